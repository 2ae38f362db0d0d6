"""How results are written: whole files."""

import pytest

from normplug._results import replace_file, write_file


@pytest.mark.parametrize("content", ["ä\r\nb\n", b"\x00\xff"], ids=["text", "bytes"])
def test_a_file_is_written_as_it_is_into_a_directory_that_is_made(content, tmp_path):
    path = tmp_path / "made" / "file"
    write_file(path, "something else")
    write_file(path, content)
    assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("stop", [OSError, KeyboardInterrupt])
def test_a_write_that_is_cut_off_leaves_the_old_file_and_nothing_else(stop, tmp_path):
    path = tmp_path / "file"
    write_file(path, "old")

    def cut_off():
        with replace_file(path) as part:
            part.write_text("new, but not all of")
            raise stop

    with pytest.raises(stop):
        cut_off()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
