# SPDX-License-Identifier: Apache-2.0
"""Lists of the sites that one hides among: nobody gets a key into one that its readers do not see."""

import pytest

pytest.importorskip("cryptography")
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from perada.deploy.sums.identity import format_public_key, read_identity, read_sites, sign_sites, write_identity
from perada.deploy.sums.keys import sign

KEYS = [format_public_key(Ed25519PrivateKey.generate().public_key()) for _ in range(3)]


@pytest.fixture
def write_list(tmp_path):
    """Writes a list of sites, as it is."""

    def write(text):
        (tmp_path / "sites.txt").write_bytes(text.encode())
        return tmp_path / "sites.txt"

    return write


def test_a_list_is_read(write_list):
    result = read_sites(write_list(f"# hospitals\n\n{KEYS[0]} st-marys\r\n  {KEYS[1]}\tköln-2\n"))
    assert {name: format_public_key(key) for name, key in result.items()} == {"st-marys": KEYS[0], "köln-2": KEYS[1]}


HIDDEN = ["\r", "\x0b", "\x0c", "\x1c", "\x1e", "\x85", "\u2028", "\u2029"]
"""What ends a line for ``str.splitlines``, and not for those who look at a file."""


@pytest.mark.parametrize("end", HIDDEN, ids=ascii)
def test_no_second_key_hides_in_a_line(end, write_list):
    """A site that sends its line to who keeps the list could be two."""
    with pytest.raises(ValueError, match="unique name"):
        read_sites(write_list(f"{KEYS[0]} one{end}{KEYS[1]} two\n"))
    assert list(read_sites(write_list(f"# sites{end}{KEYS[1]} two\n{KEYS[0]} one\n"))) == ["one"]


@pytest.mark.parametrize("name", ["a\u200b", "a/b", "a" * 65, "#a", "a\x00"], ids=ascii)
def test_names_are_those_that_a_site_may_have(name, write_list):
    with pytest.raises(ValueError, match="unique name"):
        read_sites(write_list(f"{KEYS[0]} {name}\n"))


def test_no_name_or_key_stands_there_twice(write_list):
    with pytest.raises(ValueError, match="unique name"):
        read_sites(write_list(f"{KEYS[0]} one\n{KEYS[1]} one\n"))
    with pytest.raises(ValueError, match="two names"):
        read_sites(write_list(f"{KEYS[0]} one\n{KEYS[0]} two\n"))


def test_a_list_of_an_authority_is_as_it_signed_it(write_list, tmp_path):
    write_identity(tmp_path / "keys", "authority")
    identity = tmp_path / "keys" / "authority.id"
    key = read_identity(identity)
    authority = format_public_key(key.public_key())
    text = f"{KEYS[0]} one\n{KEYS[1]} two\n"
    file = write_list(text)
    with pytest.raises(FileNotFoundError):
        read_sites(file, authority)
    signature = sign_sites(file, identity)
    assert list(read_sites(file, authority)) == ["one", "two"]
    with pytest.raises(ValueError, match="not signed by the authority"):
        read_sites(file, KEYS[0])
    for changed in (text + f"{KEYS[2]} three\n", text.replace("two", "too"), text[:-1]):
        with pytest.raises(ValueError, match="not signed by the authority"):
            read_sites(write_list(changed), authority)
    for what, content in (("advert", text.encode().hex()), ("sites", text)):  # a signature of another statement
        signature.write_text(sign(key, what, content))
        with pytest.raises(ValueError, match="not signed by the authority"):
            read_sites(write_list(text), authority)
