# SPDX-License-Identifier: Apache-2.0
"""What the server accepts of the content of a message in a secure sum, one part of which is wrong at a time."""

import secrets
from types import SimpleNamespace

import pytest

from perada.deploy.server import summing
from perada.deploy.server.summing import consistent_adverts
from perada.deploy.sums.keys import SEALED_SIZE, SECRET_SIZE

ORDER = ("a", "b", "c", "d")


def advert(terms="terms", heard=""):
    """The part of a site's keys that is compared with that of others."""
    return SimpleNamespace(terms=terms, heard=heard)


@pytest.mark.parametrize("heard", ["1:aa 2:xx", "1:xx 2:bb", "1:xx 2:xx"])
def test_a_site_that_differs_in_one_of_several_rounds_is_left_out(heard):
    adverts = {name: advert(heard="1:aa 2:bb") for name in "abc"} | {"d": advert(heard=heard)}
    assert list(consistent_adverts(adverts)) == ["a", "b", "c"]


def test_a_site_of_another_sum_is_left_out_although_it_has_heard_the_same():
    adverts = {name: advert(heard="1:aa") for name in "abc"} | {"d": advert("others", "1:aa")}
    assert list(consistent_adverts(adverts)) == ["a", "b", "c"]


def test_of_as_many_sites_on_both_sides_the_first_stay():
    adverts = {"b": advert("x"), "a": advert("y"), "c": advert("x"), "d": advert("y")}
    assert list(consistent_adverts(adverts)) == ["b", "c"]


def test_a_round_of_which_only_some_have_heard_excludes_nobody():
    adverts = {"a": advert(heard="1:aa 2:bb"), "b": advert(heard="2:bb"), "c": advert()}
    assert list(consistent_adverts(adverts)) == ["a", "b", "c"]


@pytest.mark.parametrize("objections", [[], ["b"], ["b", "c", "d"]])
def test_a_site_may_object_to_any_others(objections):
    assert summing._read_objections({"objects": objections}, {"b", "c", "d"}) == objections


@pytest.mark.parametrize("objections", [["a"], ["b", "nobody"], ["b", "c", "d", "a"], "b", {"b": 1}, None, 3])
def test_objections_to_anything_else_are_malformed(objections):
    with pytest.raises(ValueError, match="another site"):
        summing._read_objections({"objects": objections}, {"b", "c", "d"})


def dealt(size=SEALED_SIZE, others=ORDER[1:], holders=ORDER, digest=64):
    return {
        "sealed": {name: secrets.token_bytes(size).hex() for name in others},
        "commitments": {name: ["0" * 64, "0" * digest] for name in holders},
    }


def test_what_is_dealt_is_read():
    content = dealt()
    shares = summing._read_dealt("a", content, ORDER)
    assert {name: text.hex() for name, text in shares.sealed.items()} == content["sealed"]
    assert shares.commitments == dict.fromkeys(ORDER, ("0" * 64, "0" * 64))


@pytest.mark.parametrize(
    "change",
    [
        {"others": ORDER[1:3]},
        {"others": ORDER},
        {"size": SEALED_SIZE - 1},
        {"size": SEALED_SIZE + 1},
        {"holders": ORDER[1:]},
        {"holders": (*ORDER, "e")},
        {"digest": 63},
    ],
)
def test_shares_for_other_sites_or_of_another_form_are_malformed(change):
    with pytest.raises(ValueError, match=r"seal|commit"):
        summing._read_dealt("a", dealt(**change), ORDER)


@pytest.mark.parametrize("place", ORDER[1:])
def test_a_single_share_of_another_length_is_malformed(place):
    content = dealt()
    content["sealed"][place] += "00"
    with pytest.raises(ValueError, match="seal"):
        summing._read_dealt("a", content, ORDER)


def revealed(own=("a", "b"), gone=("c",), sizes=(SECRET_SIZE,) * 3):
    shares = [secrets.token_bytes(size).hex() for size in sizes]
    return {"own": dict(zip(own, shares, strict=False)), "gone": dict.fromkeys(gone, shares[-1])}


@pytest.mark.parametrize(
    "change",
    [
        {"own": ("a",)},
        {"own": ("a", "b", "c")},
        {"gone": ()},
        {"gone": ("b", "c")},
        {"sizes": (SECRET_SIZE - 1, SECRET_SIZE, SECRET_SIZE)},
        {"sizes": (SECRET_SIZE, SECRET_SIZE + 1, SECRET_SIZE)},
        {"sizes": (SECRET_SIZE, SECRET_SIZE, SECRET_SIZE + 1)},
    ],
)
def test_shares_of_other_sites_or_of_another_length_are_not_revealed(change):
    assert set(summing._read_revealed(revealed(), ("a", "b"), ("c",))) == {"own", "gone"}
    with pytest.raises(ValueError, match=r"reveal|length"):
        summing._read_revealed(revealed(**change), ("a", "b"), ("c",))
