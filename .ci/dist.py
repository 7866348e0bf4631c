# SPDX-License-Identifier: Apache-2.0
"""Build the sdist and the wheel of a source tree, the same bytes wherever and whenever it is done.

``python .ci/dist.py TREE OUT``, with SOURCE_DATE_EPOCH set. The wheel is built from the sdist, as a user would. Both
are built with the setuptools of this interpreter, whose version is in the wheel: `make dist` pins it. Modes of the
files in ``TREE`` are changed, and its README.md becomes the long description for an index of packages.
"""

import gzip
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from publishing import prepare


def build(kind: str, tree: Path, out: Path) -> Path:
    """Build ``sdist`` or ``wheel`` of a tree and return its path; what the build says is printed if it fails."""
    command = [sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "--outdir", str(out), str(tree)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode:
        sys.exit(f"the {kind} could not be built:\n{built.stdout}{built.stderr}")
    (path,) = out.glob("*.tar.gz" if kind == "sdist" else "*.whl")
    return path


def plain_modes(tree: Path) -> None:
    """Give files the modes that they have in git, whatever the umask was when they were written."""
    for path in tree.rglob("*"):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)


def plain_archive(path: Path, epoch: int) -> None:
    """Write an archive anew: sorted, one time, no owners. gzip's head has a time, too."""
    with tarfile.open(path) as old:
        members = [(member, old.extractfile(member)) for member in sorted(old, key=lambda member: member.name)]
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as new:
            for member, file in members:
                member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
                member.pax_headers = {}
                new.addfile(member, file)
    path.write_bytes(gzip.compress(content.getvalue(), mtime=epoch))


def main(tree: Path, out: Path) -> None:
    """Build both into an empty or new folder."""
    epoch = int(os.environ["SOURCE_DATE_EPOCH"])
    out.mkdir(parents=True, exist_ok=True)
    os.umask(0o022)
    prepare(tree)
    plain_modes(tree)
    sdist = build("sdist", tree, out)
    plain_archive(sdist, epoch)
    with tempfile.TemporaryDirectory() as folder, tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
        (unpacked,) = Path(folder).iterdir()
        wheel = build("wheel", unpacked, out)
    print(sdist, wheel, sep="\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
