import os
import stat

from structlog.testing import capture_logs

from proxy.fleet.state_files import TableFiles
from proxy.prompt import RegisteredTables
from tests.kv_world import safetensors_of


def loaded(directory):
    tables = RegisteredTables()
    TableFiles(directory).load(tables)
    return tables


def test_tables_come_back_with_their_names_and_extra_ids(tmp_path):
    files, tables = TableFiles(tmp_path), RegisteredTables()
    for table_id in ("b.c:d", "a"):
        files.put(tables.put(safetensors_of(), table_id=table_id, extra_id=7))
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}
    assert loaded(tmp_path).list() == tables.list()
    files.delete(tables.get("a"))
    files.delete(tables.get("a"))
    assert [table.table_id for table in loaded(tmp_path).list()] == ["b.c:d"]


def test_a_file_that_is_no_table_is_left_out_with_a_warning(tmp_path):
    (tmp_path / "t.0000000000000007.safetensors").write_bytes(b"no table")
    (tmp_path / "noid.safetensors").write_bytes(safetensors_of())
    (tmp_path / "u.0000000000000008.safetensors").symlink_to(tmp_path / "nothing")
    os.mkfifo(tmp_path / "v.0000000000000009.safetensors")
    with capture_logs() as logs:
        assert loaded(tmp_path).list() == []
    assert [log["event"] for log in logs] == ["a saved prompt table is not used"] * 4


def test_a_full_disk_is_told_and_the_table_works(tmp_path):
    files, tables = TableFiles(tmp_path / "tables"), RegisteredTables()
    table = tables.put(safetensors_of(), table_id="t", extra_id=7)
    (tmp_path / "tables").rmdir()
    (tmp_path / "tables").touch()
    with capture_logs() as logs:
        files.put(table)
        files.delete(table)
    assert ["not saved" in logs[0]["event"], "not removed" in logs[1]["event"]] == [True, True]
