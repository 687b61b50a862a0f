"""A role's folder of programs comes to the host whole, and what is not the role's goes."""

from __future__ import annotations

from pathlib import Path

from plugins.action.vllm_programs import packed
from plugins.modules.vllm_programs import put, unpacked


def test_a_folder_arrives_as_it_is_and_nothing_else_stays(tmp_path: Path) -> None:
    source, dest = tmp_path / "role", tmp_path / "host"
    for name, text in {"a.py": "a = 1\n", "stub/x/b.py": "", "__pycache__/a.pyc": "no"}.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    (source / "link.py").symlink_to(source / "a.py")
    files = unpacked(packed(source))
    assert packed(source) == packed(source)
    assert files == {"a.py": b"a = 1\n", "link.py": b"a = 1\n", "stub/x/b.py": b""}
    assert put(dest, files, check=True) == (["a.py", "link.py", "stub/x/b.py"], [])
    assert not dest.exists()
    put(dest, files, check=False)
    assert {str(p.relative_to(dest)): p.read_bytes() for p in dest.rglob("*") if p.is_file()} == files
    assert put(dest, files, check=False) == ([], [])
    # Drift: another content, another mode, a file of an earlier version; byte-code is nobody's business.
    (dest / "a.py").write_text("a = 2\n")
    (dest / "link.py").chmod(0o666)
    (dest / "old.py").write_text("")
    (dest / "__pycache__").mkdir()
    (dest / "__pycache__" / "a.pyc").write_text("")
    assert put(dest, files, check=False) == (["a.py", "link.py"], ["old.py"])
    assert (dest / "a.py").read_text() == "a = 1\n"
    assert (dest / "link.py").stat().st_mode & 0o777 == 0o644
    assert (dest / "__pycache__" / "a.pyc").is_file()
