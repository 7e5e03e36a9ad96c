import stat
import time

import pytest
from structlog.testing import capture_logs

from proxy.core.quotas import DAY_S, MOST_DAYS, UseBook, Used
from proxy.fleet import state_files
from proxy.fleet.state_files import UseFile

TODAY = int(time.time() // DAY_S)
KEY = (TODAY, "acme", "m")


async def test_counts_outlive_a_restart(tmp_path):
    book = UseBook({KEY: Used(2, 1, 30, 20, 10)}.items())
    file = UseFile(tmp_path, book)
    await file.save()
    assert stat.S_IMODE((tmp_path / "use").stat().st_mode) == 0o600
    later = UseBook()
    UseFile(tmp_path, later)
    later[KEY].requests += 1
    assert later == {KEY: Used(3, 1, 30, 20, 10)}


async def test_what_workers_left_is_counted_once(tmp_path):
    """There were three workers, and now there is one process."""
    for number in (1, 2, 3):
        (tmp_path / f"worker-{number}").mkdir()
        await UseFile(tmp_path / f"worker-{number}", UseBook({KEY: Used(number)}.items())).save()
    left = sorted(tmp_path.glob("worker-*"))
    (left[2] / "use").write_bytes(b"?")
    for _ in range(2):  # it may be killed before it saves
        file = UseFile(tmp_path, book := UseBook(), left)
        assert book == {KEY: Used(3)}
    await file.save()
    assert [*tmp_path.glob("worker-*/use")] == []
    UseFile(tmp_path, later := UseBook(), left)
    assert later == {KEY: Used(3)}


async def test_only_a_change_is_written_and_old_days_go(tmp_path):
    book = UseBook(((TODAY - ago, "acme", "m"), Used(1)) for ago in range(MOST_DAYS + 1))
    file = UseFile(tmp_path, book)
    await file.save()
    assert len(book) == MOST_DAYS
    book[KEY].requests += 1
    await file.save()
    (tmp_path / "use").unlink()
    await file.save()
    assert not (tmp_path / "use").exists()
    book[KEY].failed += 1
    await file.save()
    assert (tmp_path / "use").exists()


@pytest.mark.parametrize("raw", [b"?", b"kvpin-use 2\nx", b""])
async def test_a_file_that_cannot_be_read_is_one_warning(tmp_path, raw):
    (tmp_path / "use").write_bytes(raw)
    book = UseBook()
    with capture_logs() as logs:
        file = UseFile(tmp_path, book)
    assert [each["log_level"] for each in logs] == ["warning"]
    book[KEY].requests += 1
    await file.save()
    UseFile(tmp_path, later := UseBook())
    assert later == book
    assert (tmp_path / "use.unread").read_bytes() == raw  # a newer kvpin may read it


async def test_a_disk_that_is_full_is_told_and_tried_again(tmp_path, monkeypatch):
    def full(_path, _data, *, synced):
        raise OSError(28, "No space left on device")

    file = UseFile(tmp_path, book := UseBook())
    book[KEY].requests += 1
    with monkeypatch.context() as patch, capture_logs() as logs:
        patch.setattr(state_files, "write", full)
        await file.save()
    assert logs[0]["error"] == "No space left on device"
    await file.save()
    assert (tmp_path / "use").exists()
