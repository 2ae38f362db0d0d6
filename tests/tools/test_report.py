"""How results are written: whole files."""

import pytest

from normplug._results import replace_file, write_file


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path):
    path = tmp_path / "made" / "file"
    for content in (b"old", "ä\r\nb\n", b"\x00\xff"):
        write_file(path, content)
        assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)

    def cut_off(stop):
        with replace_file(path) as part:
            part.write_text("new, but not all of")
            raise stop

    for stop in (OSError, KeyboardInterrupt):
        with pytest.raises(stop):
            cut_off(stop)
    assert path.read_bytes() == b"\x00\xff"
    assert list(path.parent.iterdir()) == [path]
