"""A run outlives its machine: what lies in a mirror is whole, and a fresh machine goes on from
there.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from lightning.pytorch import Callback, Trainer, seed_everything
from unbroken import ExactCheckpoint
from unbroken.errors import UserError
from unbroken.mirror import copying, lease
from unbroken.mirror.copying import Copying, find_manifests
from unbroken.mirror.lease import Lease
from unbroken.mirror.manifest import MIRRORED, Entry, Manifest, parse
from unbroken.mirror.mirror import Mirror
from unbroken.mirror.reading import saves_in
from unbroken.mirror.save import Save
from unbroken.mirror.store import Store
from unbroken.run_folder import RunFolder, choose, find_checkpoint, last_owner, read_run_id

from tests.commands import checkpoint
from tests.plain_module import Regression
from tests.slow_stores import FailingFileSystem, SlowFileSystem
from tests.test_exact_checkpoint import Dies, assert_same_end


@pytest.fixture(autouse=True)
def empty_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies in memory belongs to one test, and nobody waits for a minute."""
    for kind in (MemoryFileSystem, SlowFileSystem, FailingFileSystem):
        kind.store.clear()
        kind.pseudo_dirs[:] = [""]
    monkeypatch.setattr(FailingFileSystem, "reason", None)
    monkeypatch.setattr(SlowFileSystem, "latency_s", 0.0)
    monkeypatch.setattr(lease, "BEAT_S", 0.05)
    monkeypatch.setattr(lease, "LOOK_S", 0.05)
    monkeypatch.setattr(lease, "PATIENCE_S", 0.5)
    monkeypatch.setattr(copying, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(copying, "HURRIED_PAUSE_S", 0.05)
    monkeypatch.setattr(copying, "STALLED_S", 0.5)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nobody disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    fit(str(folder), None)
    return folder


def fit(folder: str, url: str | None, *further: Callback) -> ExactCheckpoint:
    """What a script with a mirror does."""
    seed_everything(7, verbose=False)
    keep = ExactCheckpoint(folder, monitor="val_loss", mode="min", every="2", mirror=url)
    flags: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        max_epochs=2,
        limit_train_batches=10,
        accelerator="cpu",
        callbacks=[keep, *further],
        logger=False,
        **flags,
    )
    trainer.fit(Regression(), ckpt_path=keep.resume_from)
    return keep


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mirror, as a folder, of a run that ended in the middle. The run's own folder is lost."""
    place = tmp_path_factory.mktemp("killed")
    with pytest.raises(RuntimeError, match="died"):
        fit(str(place / "machine/run"), str(place / "store"), Dies(13))
    return place / "store"


def fill(url: str, killed: Path) -> None:
    """Copy that mirror to another place."""
    store = store_of(url)
    for path in killed.glob("run/**/*"):
        if path.is_file():
            store.write(path.relative_to(killed / "run").as_posix(), path.read_bytes())


def store_of(url: str) -> Store:
    return Store(f"{url}/run")


def newest(url: str) -> Manifest:
    return saves_in(store_of(url))[0]


@pytest.mark.daily(1)
@pytest.mark.parametrize("kind", ["folder", "file", "memory"])
def test_a_fresh_machine_goes_on_from_the_mirror_bit_for_bit(
    workplace: Path, undisturbed: Path, killed: Path, kind: str
) -> None:
    urls = {"folder": "store", "file": f"file://{workplace}/store", "memory": "memory://store"}
    fill(urls[kind], killed)
    fit("machine/run", urls[kind])
    assert_same_end(undisturbed, Path("machine/run"))
    # The end is in the mirror as well.
    shutil.rmtree("machine")
    keep = ExactCheckpoint("machine/run", mirror=urls[kind])
    assert keep.resume_from is not None
    assert_same_end(undisturbed, Path("machine/run"))
    assert keep.mirror is not None
    keep.mirror.release()


def test_what_a_mirror_holds_is_two_saves_and_nothing_else(workplace: Path) -> None:
    fit("machine/run", "memory://store")
    store = store_of("memory://store")
    saves = saves_in(store)
    assert len(saves) == 2
    needed = set().union(*(save.places for save in saves))
    assert {f"files/{name}" for name in store.names("files")} == needed
    assert store.names() == ["files", *sorted(save.name for save in saves)]


def spoil(url: str, kind: str, name: str) -> None:
    """Do to a file of the newest save what a store or a person may do."""
    store = store_of(url)
    save = newest(url)
    place = save.files[name].place(name)
    data = store.read(place)
    assert data is not None
    if kind == "truncated":
        store.write(place, data[:-100])
    elif kind == "missing":
        store.remove(place)
    elif kind == "changed":
        store.write(place, bytes([data[0] ^ 1]) + data[1:])
    elif kind == "swapped":
        older = saves_in(store)[1]
        other = store.read(older.files[name].place(name))
        assert other is not None
        assert other != data
        store.write(place, other)
    elif kind == "half a manifest":
        store.write(save.name, save.to_bytes()[:-20])
    elif kind == "manifest in the place of another":
        store.write(save.name, saves_in(store)[1].to_bytes())


@pytest.mark.parametrize(
    "kind",
    [
        "truncated",
        "missing",
        "changed",
        "swapped",
        "half a manifest",
        "manifest in the place of another",
    ],
)
def test_a_damaged_save_is_passed_over_for_the_older_whole_one(
    workplace: Path, killed: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    url = "memory://store"
    fill(url, killed)
    steps = [save.step for save in saves_in(store_of(url))]
    spoil(url, kind, "last.ckpt")
    bring(url, "machine/run")
    told = capsys.readouterr().out
    assert f"brought from memory://store/run: step {steps[1]:,}," in told
    if "manifest" not in kind:
        assert f"(step {steps[0]:,}) is passed over: its last.ckpt" in told
    assert checkpoint(Path("machine/run/last.ckpt"))["global_step"] == steps[1]
    assert not list(Path("machine/run").glob(".*.part"))


def test_after_a_damaged_save_the_mirror_holds_whole_ones_alone(
    workplace: Path, undisturbed: Path, killed: Path
) -> None:
    url = "memory://store"
    fill(url, killed)
    spoil(url, "changed", "config.yaml" if "config.yaml" in newest(url).files else "last.ckpt")
    fit("machine/run", url)
    assert_same_end(undisturbed, Path("machine/run"))
    assert all(is_whole(store_of(url), save) for save in saves_in(store_of(url)))


def is_whole(store: Store, save: Manifest) -> bool:
    for name, entry in save.files.items():
        data = store.read(entry.place(name))
        if data is None or hashlib.sha256(data).hexdigest() != entry.sha256:
            return False
    return True


def test_a_mirror_without_a_whole_save_is_an_error_and_no_fresh_start(
    workplace: Path, killed: Path
) -> None:
    url = "memory://store"
    fill(url, killed)
    for save in saves_in(store_of(url)):
        store_of(url).remove(save.files["last.ckpt"].place("last.ckpt"))
    keep = ExactCheckpoint("machine/run", mirror=url)
    with pytest.raises(UserError, match=r"has no whole save .its (best|last)\.ckpt is missing"):
        _ = keep.resume_from
    assert not Path("machine/run").exists()


def test_a_run_that_was_killed_inside_its_first_copy_starts_afresh(workplace: Path) -> None:
    store = store_of("memory://store")
    run_id = "c" * 8
    begun = Manifest(7, 6, run_id, "b" * 32, 1.5, {"last.ckpt": Entry(30, "a" * 64)})
    store.write(begun.begun_name, begun.to_bytes())
    store.write(f"files/{'a' * 64}.ckpt", b"half a checkpoi")
    Path("machine/run").mkdir(parents=True)
    Path("machine/run/run-id.txt").write_text(run_id)
    fit("machine/run", "memory://store")
    assert newest("memory://store").step == 20
    assert newest("memory://store").number > 7
    assert f"{'a' * 64}.ckpt" not in store.names("files")
    assert store.names() == ["files", *sorted(save.name for save in saves_in(store))]


def test_the_newer_of_the_folder_and_the_mirror_is_taken_and_said(
    workplace: Path, undisturbed: Path, killed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = "memory://store"
    fill(url, killed)
    bring(url, "machine/run")
    assert "brought from memory://store/run: step 12," in capsys.readouterr().out
    # It is as far now.
    bring(url, "machine/run")
    assert "is not ahead of" in capsys.readouterr().out
    run_id = Path("machine/run/run-id.txt").read_text()
    assert run_id.strip() == newest(url).run_id
    # The undisturbed run is another one, and is not mixed with it.
    shutil.copytree(undisturbed, "other/run")
    with pytest.raises(UserError, match="holds another run of this name"):
        bring(url, "other/run")


def test_a_mirror_replaces_no_file_of_another_run_that_saved_nothing(
    workplace: Path, killed: Path
) -> None:
    folder = workplace / "machine/run"
    folder.mkdir(parents=True)
    (folder / "run-id.txt").write_text("another")
    (folder / "metrics.csv").write_text("x")
    before = what_lies_in(folder)
    with pytest.raises(UserError, match="holds another run of this name"):
        choose(Path("machine"), "run", "auto", Mirror(str(killed)))
    (folder / "run-id.txt").unlink()
    with pytest.raises(UserError, match="is no run's folder: it holds metrics"):
        choose(Path("machine"), "run", "auto", Mirror(str(killed)))
    (folder / "run-id.txt").write_text("another")
    assert what_lies_in(folder) == before


def bring(url: str, folder: str) -> list[str]:
    mirror = Mirror(url)
    mirror.claim(Path(folder).absolute())
    lines = mirror.bring(read_run_id(Path(folder)))
    mirror.release()
    print(*lines)
    return lines


def test_a_mirror_of_another_run_is_neither_taken_nor_written(workplace: Path) -> None:
    url = "memory://store"
    fit("machine/run", url)
    before = dict(MemoryFileSystem.store)
    fit("other/run", None)
    with pytest.raises(UserError, match="holds another run of this name"):
        fit("other/run", url)
    assert MemoryFileSystem.store.keys() == before.keys()


def test_a_run_that_goes_on_without_its_mirror_is_told(workplace: Path) -> None:
    with pytest.raises(RuntimeError, match="died"):
        fit("machine/run", "memory://store", Dies(13))
    found = choose(Path("machine"), "run", "auto")
    assert found.notes == [
        "run has a mirror, which gets nothing of this start: add --mirror again."
    ]
    fit("other/run", None)
    assert choose(Path("other"), "run", "auto").notes == []


# What is the user's


def thesis_of(folder: Path) -> Path:
    """A folder with files of the user's."""
    folder.mkdir(parents=True)
    (folder / "thesis.txt").write_text("x")
    return folder


def what_lies_in(folder: Path) -> dict[str, bytes | str]:
    """Every file below a folder with its contents, and every link with its target."""
    found: dict[str, bytes | str] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_file():
            found[name] = path.read_bytes()
    return found


def put_files(place: Path) -> None:
    thesis_of(place / "files")


def put_a_file_in_its_place(place: Path) -> None:
    place.write_text("x")


def put_a_lease_of_a_house(place: Path) -> None:
    place.mkdir()
    (place / "lease.json").write_text('{"owner": "Alice", "rent": 900}')


def put_a_link_in_its_place(place: Path) -> None:
    thesis_of(place.parent.parent / "home")
    place.symlink_to(place.parent.parent / "home")


def put_a_link_for_its_files(place: Path) -> None:
    thesis_of(place.parent.parent / "home")
    place.mkdir()
    (place / "files").symlink_to(place.parent.parent / "home")


def put_a_link_for_its_lease(place: Path) -> None:
    home = thesis_of(place.parent.parent / "home")
    place.mkdir()
    (place / "lease.json").symlink_to(home / "thesis.txt")


@pytest.mark.parametrize(
    ("put", "told"),
    [
        (put_files, "is no mirror of a run, and is not empty (it holds files)"),
        (put_a_file_in_its_place, "is no mirror of a run, and is not empty"),
        (put_a_lease_of_a_house, "is not empty (it holds lease.json)"),
        (put_a_link_in_its_place, "store/run is a link or no file"),
        (put_a_link_for_its_files, "store/run/files is a link or no file"),
        (put_a_link_for_its_lease, "store/run/lease.json is a link or no file"),
    ],
)
def test_a_mirror_changes_nothing_where_the_users_own_files_are(
    workplace: Path, put: Callable[[Path], None], told: str
) -> None:
    (workplace / "store").mkdir()
    put(workplace / "store/run")
    before = what_lies_in(workplace)
    with pytest.raises(UserError) as error:
        choose(Path("machine"), "run", "auto", Mirror("store"))
    assert told in str(error.value)
    assert "\n" not in str(error.value)
    assert what_lies_in(workplace) == before


def test_a_mirror_in_the_runs_own_folder_is_refused_and_changes_nothing(workplace: Path) -> None:
    thesis_of(workplace / "machine/run")
    before = what_lies_in(workplace)
    for place in ("machine", "machine/run", "machine/run/store"):
        with pytest.raises(UserError, match="must be another folder than the runs'"):
            Mirror(place).claim(workplace / "machine/run")
    # In the working folder it has a place of its own.
    fit("machine/other", ".")
    now = what_lies_in(workplace)
    assert {name: now[name] for name in before} == before


def test_what_no_manifest_names_stays_in_a_mirror_to_the_end(workplace: Path, killed: Path) -> None:
    shutil.copytree(killed, "store")
    place = workplace / "store/run"
    Path(place / "notes.txt").write_text("x")
    Path(place / "files/thesis.txt").write_text("x")
    Path(place / f"files/{'a' * 64}.ckpt").write_text("x")
    Path(place / "manifest-00000099-aaaaaaaa.json").write_text("x")
    # A copy that was broken off names what it left: contents, and half a manifest.
    store = Store("store/run")
    run_id = saves_in(store)[0].run_id
    begun = Manifest(98, 14, run_id, "b" * 32, 1.5, {"last.ckpt": Entry(30, "b" * 64)})
    store.write(begun.begun_name, begun.to_bytes())
    store.write(begun.name, begun.to_bytes()[:-20])
    store.write(f"files/{'b' * 64}.ckpt", b"half a checkpoi")
    fit("machine/run", "store")
    saves = saves_in(store)
    needed = set().union(*(save.places for save in saves))
    others = {"files/thesis.txt", f"files/{'a' * 64}.ckpt"}
    assert {f"files/{name}" for name in store.names("files")} == needed | others
    names = [*(save.name for save in saves), "files", "manifest-00000099-aaaaaaaa.json"]
    assert store.names() == sorted([*names, "notes.txt"])


def test_of_a_huge_lease_and_a_huge_manifest_only_the_begin_is_read(
    workplace: Path, killed: Path
) -> None:
    shutil.copytree(killed, "store")
    store = Store("store/run")
    for name in (lease.FILE, "manifest-00000099-aaaaaaaa.json", "begun-00000099-aaaaaaaa.json"):
        with open(workplace / "store/run" / name, "wb") as file:
            file.truncate(3 * 2**30)
        found = store.read(name)
        assert found is not None
        assert len(found) == 100_001
    fit("machine/run", "store")
    assert newest(str(workplace / "store")).step == 20


# What waits, and what is held


class Gate(Store):
    """A store whose contents pass only when they are let through."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.opened = threading.Event()
        self.asked = threading.Event()

    def put(self, source: Any, size: int, name: str, moved: Any) -> None:
        self.asked.set()
        assert self.opened.wait(10)
        super().put(source, size, name, moved)


def test_of_several_saves_that_wait_only_the_newest_is_copied(workplace: Path) -> None:
    store = Gate("memory://store/run")
    owner = Lease(store, "run")
    owner.claim(None)
    thread = Copying(store, owner, "id", set())
    last = workplace / "last.ckpt"
    for step in (1, 2, 3):
        (workplace / "beside").write_text(str(step))
        (workplace / "beside").replace(last)
        thread.take(Save.of(workplace, step))
        # The first is being copied when the others come.
        assert store.asked.wait(10)
    store.opened.set()
    assert thread.wait(10)
    found = saves_in(store)
    contents = [store.read(save.files["last.ckpt"].place("x.ckpt")) for save in found]
    assert [(save.number, save.step) for save in found] == [(2, 3), (1, 1)]
    assert contents == [b"3", b"1"]
    thread.end()
    owner.release()


def test_a_save_stays_what_it_was_while_the_run_goes_on(workplace: Path) -> None:
    (workplace / "last.ckpt").write_text("first")
    (workplace / "metrics.csv").write_text("1\n")
    save = Save.of(workplace, 1)
    (workplace / "beside").write_text("second")
    (workplace / "beside").replace(workplace / "last.ckpt")
    with open(workplace / "metrics.csv", "a") as file:
        file.write("2\n")
    held = {name: each.file.read(each.size) for name, each in save.files.items()}
    assert held == {"last.ckpt": b"first", "metrics.csv": b"1\n"}
    save.close()


# Stores that are slow, or fail


@pytest.mark.nightly
def test_a_slow_store_slows_no_step(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlowFileSystem, "latency_s", 0.1)
    monkeypatch.setattr(copying, "STALLED_S", 5.0)
    waited = []
    take = Mirror.take

    def timed(self: Mirror, step: int | None = None) -> None:
        begun = time.perf_counter()
        take(self, step)
        waited.append(time.perf_counter() - begun)

    monkeypatch.setattr(Mirror, "take", timed)
    fit("machine/run", "slow://store")
    assert len(waited) > 5
    assert sorted(waited)[len(waited) // 2] < 0.02
    assert newest("slow://store").step == 20


class Refuses(Callback):
    """Lets the store refuse between two steps."""

    def __init__(self, first: int, last: int) -> None:
        self.first = first
        self.last = last

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.first:
            FailingFileSystem.reason = "no credentials"
        if trainer.global_step == self.last:
            wait_until(lambda: copying_of(trainer).failure is not None)
            FailingFileSystem.reason = None


def copying_of(trainer: Trainer) -> Copying:
    (keep,) = [each for each in trainer.callbacks if isinstance(each, ExactCheckpoint)]  # type: ignore[attr-defined]
    assert keep.mirror is not None
    assert keep.mirror._copying is not None
    return keep.mirror._copying


def wait_until(holds: Any, seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_store_that_refuses_for_a_while_is_told_when_it_begins_and_ends(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep = fit("machine/run", "failing://store", Refuses(3, 9))
    told = capsys.readouterr().out
    assert told.count("takes no copies (no credentials). Training goes on") == 1
    assert told.count("takes copies again") == 1
    assert "mirror: step 20 is in failing://store/run." in told
    assert keep.mirror is not None
    assert keep.mirror.lack is None


def test_a_store_that_refuses_to_the_end_is_told_with_what_it_holds(
    workplace: Path, undisturbed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep = fit("machine/run", "failing://store", Refuses(9, 1000))
    assert_same_end(undisturbed, Path("machine/run"))
    assert keep.mirror is not None
    lack = keep.mirror.lack
    assert lack is not None
    assert "the mirror is not complete: failing://store/run holds step" in lack
    assert "the run is at step 20" in lack
    assert lack in capsys.readouterr().out


# Who may write


def test_a_second_machine_is_refused_while_the_first_one_trains(workplace: Path) -> None:
    first = Mirror("memory://store")
    first.claim(workplace / "one/run")
    # Two runs of one process take it from each other, as in a notebook.
    lease.HELD.clear()
    second = Mirror("memory://store")
    with pytest.raises(UserError, match="is trained by another process"):
        second.claim(workplace / "two/run")
    first.release()
    second.claim(workplace / "two/run")
    second.release()


def test_a_lease_that_nobody_renews_runs_out(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = store_of("memory://store")
    store.write(lease.FILE, b'{"owner": "dead", "machine": "node-7", "renewed": 3}')
    mirror = Mirror("memory://store")
    begun = time.monotonic()
    mirror.claim(workplace / "run")
    assert time.monotonic() - begun >= 0.5
    assert "the lease of node-7 has run out" in capsys.readouterr().out
    mirror.release()


def test_the_lease_of_a_process_that_died_here_is_not_waited_for(workplace: Path) -> None:
    store = store_of("memory://store")
    folder = workplace / "run"
    run = RunFolder(folder)
    run.create()
    (folder / ".mirror-owner").write_text("dead")
    store.write(lease.FILE, b'{"owner": "dead", "machine": "here", "renewed": 3}')
    run.release()
    assert last_owner(folder) == "dead"
    mirror = Mirror("memory://store")
    begun = time.monotonic()
    mirror.claim(folder, last_owner(folder))
    assert time.monotonic() - begun < 0.4
    mirror.release()


def test_who_lost_the_lease_copies_nothing_more(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class TakesOver(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == 7:
                found = copying_of(trainer)
                wait_until(lambda: found.copied_step == 6)
                store_of("memory://store").write(lease.FILE, b'{"owner": "another"}')

    fit("machine/run", "memory://store", TakesOver())
    assert newest("memory://store").step == 6
    assert "another machine has taken over this run" in capsys.readouterr().out
    assert store_of("memory://store").read(lease.FILE) == b'{"owner": "another"}'


# What only reads


def test_a_checkpoint_is_read_by_its_runs_address_and_by_its_own(
    workplace: Path, killed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = "memory://store"
    fill(url, killed)
    save = newest(url)
    for address, name in {
        f"{url}/run": "best.ckpt",
        f"{url}/run/last.ckpt": "last.ckpt",
        f"{url}/run/{save.files['last.ckpt'].place('last.ckpt')}": "last.ckpt",
    }.items():
        path = find_checkpoint(address)
        assert hashlib.sha256(path.read_bytes()).hexdigest() == save.files[name].sha256
    assert "read from memory://store/run: last.ckpt of step 12." in capsys.readouterr().out
    with pytest.raises(UserError, match=r"holds several runs; add one's name: run\."):
        find_checkpoint(url)
    with pytest.raises(UserError, match="there is no checkpoint and no mirrored run at"):
        find_checkpoint("memory://elsewhere/last.ckpt")


# What is typed


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("s4://bucket/x", "must be a folder, or an address such as s3://"),
        ("runs", "must be another folder than the runs'"),
    ],
)
def test_an_address_that_cannot_be_a_mirror_is_refused(
    workplace: Path, url: str, told: str
) -> None:
    with pytest.raises(UserError, match=told):
        Mirror(url).claim(workplace / "runs/run")
    assert not (workplace / "runs").exists()


@pytest.mark.skipif(find_spec("s3fs") is not None, reason="s3fs is installed")
def test_a_package_that_is_missing_is_asked_for_in_one_line(workplace: Path) -> None:
    with pytest.raises(UserError) as error:
        Mirror("s3://bucket/runs").claim(workplace / "runs/run")
    told = "--mirror s3://bucket/runs needs a package that is not installed"
    assert str(error.value) == f"{told}: pip install s3fs."


def test_a_password_in_an_address_is_not_printed() -> None:
    assert Mirror("sftp://me:secret@host/x").shown == "sftp://me:***@host/x"


# A manifest


def test_a_manifest_is_read_again_and_every_change_of_it_is_seen() -> None:
    entry = Entry(3, "a" * 64)
    manifest = Manifest(12, 40, "id", "b" * 32, 1.5, {"last.ckpt": entry, "metrics.csv": entry})
    data = manifest.to_bytes()
    assert parse(data) == manifest
    assert all(parse(data[:end]) is None for end in range(len(data)))
    for place in range(0, len(data), 3):
        changed = data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]
        assert parse(changed) in (None, manifest), changed


@pytest.mark.parametrize(
    "files",
    [
        {"../last.ckpt": Entry(3, "a" * 64)},
        {"last.ckpt": Entry(3, "../../" + "a" * 58)},
        {"last.ckpt": Entry(-1, "a" * 64)},
    ],
)
def test_a_manifest_of_a_stranger_names_no_other_place(files: dict[str, Entry]) -> None:
    assert parse(Manifest(1, 1, "id", "b" * 32, 1.5, files).to_bytes()) is None


def test_no_other_file_than_those_of_a_run_is_mirrored(workplace: Path) -> None:
    fit("machine/run", "memory://store")
    assert set(newest("memory://store").files) <= set(MIRRORED)
    assert find_manifests(store_of("memory://store"))
