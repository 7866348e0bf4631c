# SPDX-License-Identifier: Apache-2.0
"""Secure sums among sites in this process: right sums, which lies of a server are rejected, and what it can read."""

import secrets
from collections import Counter
from dataclasses import fields, replace
from itertools import combinations

import numpy as np
import pytest

pytest.importorskip("cryptography")
pytest.importorskip("Crypto")
from Crypto.Cipher import ChaCha20
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from perada.deploy.protocol import RejectionError
from perada.deploy.sums import keys, shares, site
from perada.deploy.sums.keys import SumTerms
from perada.deploy.sums.server import ServerRound
from perada.deploy.sums.site import SiteRound
from perada.server.sums import SecureSums

NAMES = [f"site{number}" for number in range(7)]
HEARD_DIGITS = len(keys.SiteClaims(received_digests={"1": "0" * 64}).texts()["heard"]) - 3
TERMS = SumTerms("a" * 32, 4, "b" * 64, SecureSums())
IDENTITIES = {name: Ed25519PrivateKey.generate() for name in [*NAMES, "stranger"]}


def peers(name, known=NAMES):
    return {other: IDENTITIES[other].public_key() for other in known if other != name}


def sites(names=NAMES, terms=TERMS, known=NAMES):
    return {name: SiteRound(name, IDENTITIES[name], peers(name, known), terms) for name in names}


def vectors(names=NAMES, count=50):
    return {
        name: np.random.default_rng([7, place]).integers(0, 2**64, count, np.uint64) for place, name in enumerate(names)
    }


def rows(found, *gone):
    return {name: value for name, value in found.items() if name not in gone}


def hold_all(parties, boxes, server):
    for name, party in parties.items():
        party.hold(boxes[name], commitments_for(server, name))


def commitments_for(server, name):
    return {dealer: said[name] for dealer, said in server.commitments.items()}


class Round:
    """Runs the steps one after another; ``gone`` are those that are no longer there from a step on."""

    def __init__(self, parties, given, terms=TERMS):
        self.parties = parties
        self.given = given
        self.terms = terms
        self.seen = []

    def run(self, share=(), mask=(), confirm=(), reveal=()):
        self.adverts = [party.advertise() for party in self.parties.values()]
        there = rows(self.parties, *share)
        self.server = ServerRound(self.terms, self.adverts)
        self.boxes = self.server.deliver({name: party.share(self.adverts) for name, party in there.items()})
        hold_all(there, self.boxes, self.server)
        names = self.server.begin(there)
        there = rows(there, *mask)
        masked = {name: party.mask(names, self.given[name]) for name, party in there.items()}
        self.seen.append(masked)
        alive = self.server.take(masked)
        there = rows(there, *confirm)
        signatures = {name: party.confirm(alive) for name, party in there.items()}
        there = rows(there, *reveal)
        return self.server.total({name: party.reveal(signatures) for name, party in there.items()})


def plain(given, *gone):
    total = np.zeros(50, np.uint64)
    for vector in rows(given, *gone).values():
        total = total + vector
    return total


def test_the_sum_is_that_of_the_vectors():
    site_vectors = vectors()
    assert np.array_equal(Round(sites(), site_vectors).run(), plain(site_vectors))


@pytest.mark.parametrize("gone", [("site0",), ("site6",), ("site2", "site5")])
@pytest.mark.parametrize("step", ["share", "mask", "confirm", "reveal"])
def test_whoever_goes_the_sum_is_of_those_that_sent_their_part(step, gone):
    site_vectors = vectors()
    total = Round(sites(), site_vectors).run(**{step: gone})
    assert np.array_equal(total, plain(site_vectors, *(gone if step in ("share", "mask") else ())))


def test_sites_that_go_at_each_step():
    site_vectors = vectors()
    total = Round(sites(), site_vectors, TERMS).run(mask=["site1"], confirm=["site3"], reveal=[])
    assert np.array_equal(total, plain(site_vectors, "site1"))


@pytest.mark.parametrize("step", ["share", "mask", "confirm", "reveal"])
def test_a_round_with_too_few_is_void(step):
    with pytest.raises(RejectionError, match=r"secure sum: .*4 .* (5|too few)|are too few"):
        Round(sites(), vectors()).run(**{step: NAMES[:3]})


def stream(key, count):
    """The key stream of ChaCha20 by another library."""
    return np.frombuffer(ChaCha20.new(key=key, nonce=bytes(8)).encrypt(bytes(8 * count)), "<u8")


@pytest.mark.parametrize("count", [0, 1, keys._BLOCK - 1, keys._BLOCK, 2 * keys._BLOCK + 3])
def test_streams_are_added_in_place_as_another_library_makes_them(count):
    random = np.random.default_rng(3)
    total = random.integers(0, 2**64, count, np.uint64)
    added = [random.bytes(32), random.bytes(32)]
    subtracted = [random.bytes(32), added[0]]
    expected = total + stream(added[1], count) - stream(subtracted[0], count)
    assert keys.add_streams(total, added, subtracted) is None
    assert np.array_equal(total, expected)


def test_each_key_masks_one_vector_and_pairs_have_one_in_common(monkeypatch):
    used = Counter()

    def noted(total, added, subtracted):
        used.update([*added, *subtracted])
        keys.add_streams(total, added, subtracted)

    monkeypatch.setattr(site, "add_streams", noted)
    Round(sites(), vectors()).run()
    Round(sites(), vectors()).run()  # the same run, round and sites
    assert sorted(used.values()) == [1] * 2 * len(NAMES) + [2] * 2 * len([*combinations(NAMES, 2)])


def test_what_the_server_receives_is_uniform_whatever_is_sent():
    """Bytes of all masked vectors are counted; of a mask left out zeros would be half of them."""
    site_vectors = dict.fromkeys(NAMES, np.zeros(20_000, np.uint64))
    one = Round(sites(), site_vectors)
    one.run(mask=["site1"])
    for vector in one.seen[0].values():
        counts = np.bincount(vector.view(np.uint8), minlength=256)
        chi = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
        assert 160 < chi < 370  # 255 ± 5 standard deviations
    whole = np.stack([*one.seen[0].values()])
    for size in range(1, len(whole)):  # sums of some of them hide as well
        part = np.add.reduce(whole[:size])
        assert abs(np.bincount(part.view(np.uint8), minlength=256).std() - np.sqrt(20_000 * 8 / 256)) < 6


def view(given, monkeypatch, shifts=None, late=()):
    """All that the server receives, by made-up random numbers; streams of some keys are shifted by vectors."""
    random = np.random.default_rng(5)
    monkeypatch.setattr(site.secrets, "token_bytes", random.bytes)
    monkeypatch.setattr("Crypto.Protocol.SecretSharing.rng", random.bytes)

    def shifted(total, added, subtracted):
        keys.add_streams(total, added, subtracted)
        for key, shift in (shifts or {}).items():
            total += shift * np.uint64(added.count(key))
            total -= shift * np.uint64(subtracted.count(key))

    monkeypatch.setattr(site, "add_streams", shifted)
    parties = sites()
    adverts = [party.advertise() for party in parties.values()]
    server = ServerRound(TERMS, adverts)
    sealed = {name: party.share(adverts) for name, party in parties.items()}
    hold_all(parties, server.deliver(sealed), server)
    names = server.begin(parties)
    masked = {name: party.mask(names, given[name]) for name, party in parties.items()}
    alive = server.take(rows(masked, *late))
    signatures = {name: parties[name].confirm(alive) for name in alive}
    revealed = {name: parties[name].reveal(signatures) for name in alive}
    monkeypatch.undo()
    seen = adverts, sealed, {name: vector.tobytes() for name, vector in masked.items()}, signatures, revealed
    return seen, server.total(revealed), parties


def test_other_vectors_with_the_same_sum_look_the_same_to_the_server(monkeypatch):
    """To each choice of keys belongs another one with which the server receives the same bytes, so that both vectors
    are as likely. It has all shares that were revealed, and what a site sent that came too late for the sum."""
    site_vectors = vectors()
    late = "site3"
    random = np.random.default_rng(11)
    there = [name for name in NAMES if name != late]
    moves = {name: random.integers(0, 2**64, 50, np.uint64) for name in NAMES}
    moves[there[0]] = np.uint64(0) - np.add.reduce([moves[name] for name in there[1:]])
    seen, total, parties = view(site_vectors, monkeypatch, late=[late])
    first = parties[there[0]]
    shifts = {keys.self_mask_key(parties[late]._seeds["own"]): np.uint64(0) - moves[late]}
    for name in there[1:]:  # the first adds the mask that it has in common with each, who subtracts it
        key = keys.pair_mask_key(
            first._keys["masks"], first._adverts[name].masks, first._keys_digest, (first.name, name)
        )
        shifts[key] = moves[name]
    other, same, _ = view(
        {name: vector + moves[name] for name, vector in site_vectors.items()}, monkeypatch, shifts, [late]
    )
    assert np.array_equal(total, same) and np.array_equal(total, plain(site_vectors, late))
    assert seen == other


def test_masks_are_taken_away_by_nothing_but_the_sum():
    """With the keys revealed for a sum, the vector of one site of it stays under the masks with the others."""
    site_vectors = vectors()
    one = Round(sites(), site_vectors)
    one.run()
    known = stream(keys.self_mask_key(one.parties["site0"]._seeds["own"]), 50)
    assert not np.array_equal(one.seen[0]["site0"] - known, site_vectors["site0"])


def begin_sum(names=NAMES, terms=TERMS):
    parties = sites(names, terms)
    return parties, [party.advertise() for party in parties.values()]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda adverts, other: [*adverts, adverts[1]], "the list names a site twice"),
        (lambda adverts, other: adverts[:2], "2 sites are too few to hide among"),
        (lambda adverts, other: adverts[1:], "different keys for this site, or none"),
        (lambda adverts, other: [other[0], *adverts[1:]], "different keys for this site, or none"),
        (lambda adverts, other: [*adverts, other[-1]], "'stranger' is not among"),
        (lambda adverts, other: [replace(adverts[1], masks=adverts[2].masks), *adverts[::2]], "'site1' are not signed"),
        (lambda adverts, other: [replace(adverts[1], name="site3"), *adverts[::2]], "'site3' are not signed"),
        (lambda adverts, other: [adverts[0], *adverts[2:], other[1]], "'site1' are for a different sum"),
    ],
)
def test_lists_of_keys_that_a_server_made_up_are_rejected(change, message):
    parties, adverts = begin_sum()
    _, other = begin_sum([*NAMES[:2], "stranger"], replace(TERMS, round=3))
    with pytest.raises(RejectionError, match=message):
        parties["site0"].share(change(adverts, other))


@pytest.mark.parametrize("name", [field.name for field in fields(keys.Advert) if field.name != "signature"])
def test_all_that_a_site_says_with_its_keys_is_signed(name):
    """Which numbers it adds too: or a server has a sum of losses to which one site adds."""
    parties, adverts = begin_sum()
    other = {"name": "site3", "numbers": "loss", "heard": f"1:{'0' * HEARD_DIGITS} "}.get(name, "12" * 32)
    adverts[1] = replace(adverts[1], **{name: other})
    with pytest.raises(RejectionError, match=r"are not signed by it|twice"):
        parties["site0"].share(adverts[:3] if name == "name" else adverts)


def shared(names=NAMES):
    parties, adverts = begin_sum(names)
    server = ServerRound(TERMS, adverts)
    return parties, server.deliver({name: one.share(adverts) for name, one in parties.items()}), server


def test_shares_of_others_or_of_another_round_are_rejected():
    _, before, _ = shared()
    for change, message in (
        (lambda box: rows(box, *NAMES[1:4]), "4 of 7 sites sent shares, which is too few"),
        (lambda box: {**box, "stranger": box["site1"]}, "unknown site"),
        (lambda box: {**box, "site1": box["site2"]}, "'site1': a sealed message was changed"),
        (lambda box: {**box, "site1": before["site0"]["site1"]}, "'site1': a sealed message was changed"),
    ):
        parties, boxes, server = shared()
        said = commitments_for(server, "site0")
        with pytest.raises(RejectionError, match=message):
            parties["site0"].hold(change(boxes["site0"]), said)
        with pytest.raises(RejectionError, match="next step"):  # nor with what it should have been
            parties["site0"].hold(boxes["site0"], said)


def test_each_direction_has_a_sealing_key_of_its_own(monkeypatch):
    """With one for both the server reads the exclusive or of two sites' shares: the nonce is always the same."""
    used = Counter()

    def noted(key, text, about):
        used[key] += 1
        return keys.seal(key, text, about)

    monkeypatch.setattr(site, "seal", noted)
    shared()
    assert len(used) == len(NAMES) * (len(NAMES) - 1) and set(used.values()) == {1}
    one, other = (keys.X25519PrivateKey.generate() for _ in range(2))  # also if a site had one pair of keys for both
    publics = [key.public_key().public_bytes_raw().hex() for key in (one, other)]
    there = keys.sealing_key(one, publics[1], "about", "a", "b")
    assert there == keys.sealing_key(other, publics[0], "about", "a", "b")
    assert there != keys.sealing_key(one, publics[1], "about", "b", "a")


def test_what_a_site_seals_does_not_open_what_is_sealed_for_it():
    """It opens the first to a server that judges a dispute, and the other sites' shares must stay closed."""
    parties, boxes, _ = shared()
    opened = keys.exchange_key(parties["site0"].open())
    for dealer, text in boxes["site0"].items():
        for public in (parties[dealer].advert.seals, parties[dealer].advert.shares):
            for pair in (("site0", dealer), (dealer, "site0")):
                with pytest.raises(ValueError, match="was changed"):
                    keys.unseal(keys.sealing_key(opened, public, parties["site0"]._keys_digest, *pair), text, "")
    assert len({*vars(parties["site0"].advert).values()}) == len(vars(parties["site0"].advert)) - 1  # "" twice


def test_a_dealer_cannot_show_that_it_was_honest_with_another_key():
    """It seals with a key that the other site does not have, and says later that this was the one."""
    parties, adverts = begin_sum()
    server = ServerRound(TERMS, adverts)
    other = secrets.token_bytes(16)
    seals = parties["site0"]._seeds["seals"]
    parties["site0"]._keys["seals"] = keys.exchange_key(other)
    boxes = server.deliver({name: one.share(adverts) for name, one in parties.items()})
    with pytest.raises(site.Objection, match=r"'site0': .*changed"):
        parties["site1"].hold(boxes["site1"], commitments_for(server, "site1"))
    assert not server.dealt_honestly("site0", other, "site1")
    assert not server.dealt_honestly("site0", seals, "site1")
    assert server.dealt_honestly("site2", parties["site2"]._seeds["seals"], "site1")


@pytest.mark.parametrize("place", [0, 1])
def test_a_dealer_that_commits_to_one_other_share_of_two_lied(place):
    parties, _, server = shared()
    seals = parties["site0"]._seeds["seals"]
    assert server.dealt_honestly("site0", seals, "site1")
    committed = list(server.commitments["site0"]["site1"])
    committed[place] = "0" * 64
    server.commitments["site0"]["site1"] = tuple(committed)
    assert not server.dealt_honestly("site0", seals, "site1")
    assert server.dealt_honestly("site0", seals, "site2")


@pytest.mark.parametrize(
    ("there", "message"),
    [
        ([*NAMES, "site1"], "the list of senders names a site twice"),
        ([*NAMES, "stranger"], "that dealt no shares"),
        (NAMES[1:], "this site is missing from the list"),
        (NAMES[:4], "4 of 7 sites hold shares, which is too few"),
    ],
)
def test_lists_for_the_masks_that_a_server_made_up_are_rejected(there, message):
    parties, boxes, server = shared()
    hold_all(parties, boxes, server)
    with pytest.raises(RejectionError, match=message):
        parties["site0"].mask(there, vectors()["site0"])


def test_a_site_is_not_masked_with_one_whose_shares_do_not_open():
    parties, boxes, server = shared()
    with pytest.raises(site.Objection) as objection:
        parties["site0"].hold({**boxes["site0"], "site3": bytes(48)}, commitments_for(server, "site0"))
    assert objection.value.names == ["site3"]
    with pytest.raises(RejectionError, match="no shares"):
        parties["site0"].mask(NAMES, vectors()["site0"])


@pytest.mark.parametrize("other", ["there", "numbers", "keys"])
def test_signatures_are_of_all_that_the_sites_agree_on(other):
    """Of the list of those whose masks are in the vectors, of their length and of all keys."""
    parties, boxes, server = shared()
    hold_all(parties, boxes, server)
    signatures = {}
    for place, (name, party) in enumerate(parties.items()):
        odd = place > 3
        there = NAMES[:6] if other == "there" and odd and name != "site6" else NAMES
        party.mask(there, vectors(count=51 if other == "numbers" and odd else 50)[name])
        if other == "keys" and odd:
            party._keys_digest = "0" * 64
        signatures[name] = party.confirm(NAMES[:6]) if name != "site6" else "00" * 64
    with pytest.raises(RejectionError, match=r"4 sites .*5"):
        parties["site0"].reveal(signatures)


def mask_vectors():
    parties, boxes, server = shared()
    hold_all(parties, boxes, server)
    for name, party in parties.items():
        party.mask(NAMES, vectors()[name])
    return parties


@pytest.mark.parametrize(
    ("alive", "message"),
    [
        ([*NAMES, "site1"], "the list of survivors names a site twice"),
        ([*NAMES, "stranger"], "a site that was not a sender"),
        (NAMES[1:], "this site is missing from the list"),
        (NAMES[:4], "4 of 7 sites are too few for a sum"),
    ],
)
def test_lists_of_the_living_that_a_server_made_up_are_rejected(alive, message):
    with pytest.raises(RejectionError, match=message):
        mask_vectors()["site0"].confirm(alive)


def test_two_lists_of_the_living_reveal_nothing():
    """Three sites are told that site6 is gone, three that it is not: it would lose both halves."""
    parties = mask_vectors()
    without = NAMES[:6]
    signatures = {name: parties[name].confirm(without if place < 3 else NAMES) for place, name in enumerate(NAMES)}
    for name in NAMES:
        with pytest.raises(RejectionError, match=r"[34] sites .*5"):
            parties[name].reveal(signatures)


def test_a_site_reveals_once_and_of_each_site_one_half():
    parties = mask_vectors()
    without = NAMES[:6]
    signatures = {name: parties[name].confirm(without) for name in without}
    for name in without:
        result = parties[name].reveal(signatures)
        assert {*result["own"]} == {*without} and {*result["gone"]} == {"site6"}
        for again in (lambda party: party.reveal(signatures), lambda party: party.confirm(NAMES)):
            with pytest.raises(RejectionError, match="next step"):
                again(parties[name])


def test_signatures_count_once_and_by_those_in_the_sum():
    parties = mask_vectors()
    mine = parties["site0"].confirm(NAMES)
    with pytest.raises(RejectionError, match="1 sites signed"):
        parties["site0"].reveal({name: mine for name in NAMES})


def test_sites_that_were_told_different_things_are_in_no_sum_together():
    """However few of them: if one alone were told something else, the others' parts might be known to the server."""
    parties = sites() | sites(["site6"], replace(TERMS, given="d" * 64))
    adverts = [party.advertise() for party in parties.values()]
    for name, party in parties.items():
        other = "'site0'" if name == "site6" else "'site6'"
        with pytest.raises(RejectionError, match=f"{other} are for a different sum"):
            party.share(adverts)


def test_shares_that_somebody_changed_are_seen():
    one = Round(sites(), vectors())
    parties = one.parties
    one.adverts = [party.advertise() for party in parties.values()]
    one.server = ServerRound(TERMS, one.adverts)
    boxes = one.server.deliver({name: party.share(one.adverts) for name, party in parties.items()})
    hold_all(parties, boxes, one.server)
    names = one.server.begin(parties)
    there = rows(parties, "site6")
    alive = one.server.take({name: party.mask(names, one.given[name]) for name, party in there.items()})
    signatures = {name: party.confirm(alive) for name, party in there.items()}
    revealed = {name: party.reveal(signatures) for name, party in there.items()}
    for kind, name in (("own", "site3"), ("gone", "site6")):
        wrong = {**revealed, "site0": {**revealed["site0"], kind: {**revealed["site0"][kind], name: bytes(16)}}}
        assert np.array_equal(one.server.total(wrong), plain(one.given, "site6"))
        assert one.server.lies == {"site0": f"it revealed a different share of {name!r} than it was dealt"}
        one.server.lies.clear()
        few = {holder: wrong[holder] for holder in NAMES[:5]}  # as many as are needed, one of which is wrong
        with pytest.raises(RejectionError, match=rf"4 correct shares.*{name!r}.*5 .*site0"):
            one.server.total(few)
        one.server.lies.clear()
    total = one.server.total(revealed)
    assert np.array_equal(total, plain(one.given, "site6")) and not one.server.lies


def test_fewer_shares_than_the_threshold_say_nothing():
    """Four of the seven shares of a secret that five are needed of give another one."""
    parties, boxes, server = shared()
    hold_all(parties, boxes, server)
    for name, party in parties.items():
        party.mask(NAMES, vectors()[name])
    secret = parties["site3"]._seeds["own"]
    held = {place: parties[name]._received["site3"][0] for place, name in enumerate(NAMES)}
    for size in range(2, 8):
        some = dict([*held.items()][:size])
        assert (shares.combine(some) == secret) == (size >= 5)


def test_digests_of_what_sites_were_told_are_compared_in_full():
    """The server chooses both messages, so that it could look for two whose digests begin alike."""
    digest = "a" * 64
    others = [f"{digest[:place]}b{digest[place + 1 :]}" for place in range(64)]
    first, second = NAMES[:2]

    def heard(name, message):
        claims = keys.SiteClaims((), {"0": message})
        return SiteRound(name, IDENTITIES[name], peers(name), TERMS, claims).advertise()

    digests = keys.received_digests(heard(first, digest))
    assert len(bytes.fromhex(digests["0"])) == 32
    assert keys.conflicting_rounds(digests, heard(second, digest)) == []
    for other in others:
        assert keys.conflicting_rounds(digests, heard(second, other)) == ["0"], other


@pytest.mark.parametrize(
    ("others", "rounds"),
    [
        ({}, ""),
        ({"0": "a"}, ""),
        ({"3": "c", "7": "d"}, ""),
        ({"1": "b", "0": "c"}, "1"),
        ({"299": "d", "1": "c"}, "300"),
    ],
)
def test_two_sites_compare_the_rounds_in_which_both_were(others, rounds):
    """Of 300 rounds a site says the last 256. People count them from 1."""
    heard = {str(number): "b" * 64 for number in range(1, 300)} | {"0": "a" * 64}
    heard = {number: told for number, told in heard.items() if number != "7"}
    one = {"0": "a" * 64, "1": "b" * 64} if "299" not in others else heard
    own = [
        keys.SiteClaims((), one),
        keys.SiteClaims((), {number: told * 64 for number, told in others.items()}),
        keys.SiteClaims(),
    ]
    parties = [
        SiteRound(name, IDENTITIES[name], peers(name), TERMS, own) for name, own in zip(NAMES, own, strict=False)
    ]
    adverts = [party.advertise() for party in parties]
    if not rounds:
        assert parties[0].share(adverts).sealed.keys() == {"site1", "site2"}
        return
    for place, other in ((0, "site1"), (1, "site0")):
        with pytest.raises(RejectionError, match=rf"'{other}'.*round {rounds}$"):
            parties[place].share(adverts)
    assert parties[2].share(adverts)
