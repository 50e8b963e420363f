"""Why two recordings differ, as far as it can be told, and what to write."""

from __future__ import annotations

import re
from dataclasses import dataclass

from unbroken.verifying import recorder as kinds
from unbroken.verifying.differences import Comparison, Difference, same_samples, that_matter
from unbroken.verifying.digests import Entry
from unbroken.verifying.facts import facts_from
from unbroken.verifying.mends import (
    Known,
    bare_label,
    lines_to_hold,
    lines_to_keep,
    owner_of_label,
)
from unbroken.verifying.recordings import Moment, Recording

# The owner of a value, and the attribute of it that holds the value
OWNED = re.compile(
    r"(?P<owner>callback \w+\.state_dict\(\)|module|data|callback \w+( \d+)?|optimizers\[\d+\]"
    r"|schedules\[\d+\] \w+|\w+ data\[\d+\]\.\w+)(?P<attribute>\.\w+)?"
)
# Names that are told of a group of values.
FEW = 3
# What is told of a run, and nothing that it trains on.
REPORTED = {kinds.LOGGED, kinds.BEST, kinds.TEST}


@dataclass
class Cause:
    """A reason for a difference.

    Attributes:
        text: What is wrong, in a sentence or two.
        mend: What to write or type, a line each.
    """

    text: str
    mend: list[str]


def causes_of(undisturbed: Recording, resumed: Recording, comparison: Comparison) -> list[Cause]:
    """Causes of the differences between an undisturbed and a resumed run, the likeliest first."""
    differences = that_matter(comparison)
    places = {moment: place for place, moment in enumerate(undisturbed.rows)}
    first = min((places[each.moment] for each in differences), default=None)
    if first is None:
        return [_other_batches(comparison)] if has_other_moments(comparison) else []
    at_resume = [each for each in differences if each.moment in resumed.resumes]
    earliest = [each for each in differences if places[each.moment] == first]
    # What differs as soon as a run has resumed was not restored. What follows is its effect.
    wrong = at_resume or earliest
    if not any(each in wrong for each in earliest):
        wrong = earliest + wrong
    found = _not_kept(wrong, undisturbed)
    found += _samples(wrong, undisturbed)
    found += _random(wrong)
    found += _rates(wrong)
    found += _optimizer(wrong, undisturbed)
    found += _weights(wrong, undisturbed, is_at_resume=bool(at_resume))
    trained = [each for each in wrong if each.kind in (kinds.WEIGHTS, kinds.OPTIMIZER)]
    found += growth(undisturbed) if at_resume and trained else []
    is_only_reported = {each.kind for each in differences} <= REPORTED
    if not found and is_only_reported:
        found = _logged(wrong)
    elif not at_resume:
        found += _not_seen(undisturbed)
    if has_other_moments(comparison) and not found:
        found.append(_other_batches(comparison))
    return found


def has_other_moments(comparison: Comparison) -> bool:
    """Whether one run has batches that the other has not."""
    return bool(comparison.only_in_one or comparison.only_in_other)


def nondeterminism(
    first: Recording, undisturbed: Comparison, vary: list[Difference]
) -> list[Cause]:
    """Why two undisturbed runs differ."""
    places = {moment: place for place, moment in enumerate(first.rows)}
    earliest = min(places[each.moment] for each in vary)
    at_first = [each for each in vary if places[each.moment] == earliest]
    same = "Two undisturbed runs differ as well, so this is not the resume's fault:"
    found = []
    clocks = [each.label for each in undisturbed.of(kinds.HELD) if places[each.moment] <= earliest]
    beside = f" {_listed(clocks)} is another one in each, too." if clocks else ""
    for each in at_first:
        if each.kind == kinds.RATE:
            text = f"{same} {each.label} is {_two(each, 'and')}, as by a clock.{beside}"
            found.append(Cause(text, ["# let the rate depend on trainer.global_step, not on time"]))
        elif each.kind == kinds.SAMPLES:
            text = f"{same} {_where(each)} get other samples.{beside}"
            mend = ["# draw from torch, NumPy or random, which are seeded, not from os.urandom,"]
            found.append(
                Cause(text, [*mend, "# a clock, hash() or the order of a set or a folder"])
            )
        elif each.kind == kinds.RANDOM:
            text = (
                f"{same} {each.label} generator of random numbers is drawn another number of times."
            )
            found.append(Cause(f"{text}{beside}", ["# draw as often in every run"]))
    if found:
        return found[:FEW]
    if {each.kind for each in at_first} <= {kinds.BEST, kinds.TEST}:
        names = _listed([each.label for each in at_first])
        return [Cause(f"{same} {names}.{beside}", ["--deterministic true"])]
    name = _listed([each.label for each in at_first])
    what = "an operation of the module is not deterministic, or it uses a clock or an unseeded"
    return [
        Cause(
            f"{same} the same samples and random numbers give other values ({name}): {what}"
            f" generator.{beside}",
            ["--deterministic true"],
        )
    ]


def grew(recording: Recording) -> list[str]:
    """Weights and optimizers that are not, at the end, what they were at the start."""
    rows = [row for moment, row in recording.rows.items() if moment[1] in ("train", "end")]
    if not rows:
        return []
    start, end = rows[0].values, rows[-1].values
    found = []
    for name, entry in end.items():
        kind, _, label = name.partition(":")
        is_class = kind == kinds.OPTIMIZER and (": class" in label or ": weights in" in label)
        if kind != kinds.WEIGHTS and not is_class:
            continue
        before = start.get(name)
        if before is None:
            found.append(f"{label} is new")
        elif _shape(before.shown) != _shape(entry.shown) or (is_class and before != entry):
            found.append(f"{label} was {before.shown} and is {entry.shown}")
    return found


def growth(recording: Recording) -> list[Cause]:
    """What grew or changed its class, as a cause."""
    found = grew(recording)
    if not found:
        return []
    text = f"it changes its shape in training: {_listed(found)}."
    mend = [
        "def on_load_checkpoint(self, checkpoint):",
        "    ...  # make here what training has added, before its weights are loaded",
    ]
    return [Cause(text, mend)]


def _not_kept(wrong: list[Difference], undisturbed: Recording) -> list[Cause]:
    groups: dict[str, list[Difference]] = {}
    for each in wrong:
        if each.kind == kinds.HELD:
            groups.setdefault(_root(each.label), []).append(each)
    known = _known(wrong, undisturbed)
    found = []
    for root, group in groups.items():
        begins_anew = any(_is_fresh(each, undisturbed) for each in group)
        # An attribute is likelier than a global variable, which a library may keep for itself.
        is_global = _owner(root, group, known) is None
        # One that is soon what it was is likely filled when it is first needed.
        is_brief = not any(each.lasts for each in group)
        found.append(((is_brief, not begins_anew, is_global), root, group))
    found.sort(key=lambda each: each[0])
    # Methods of one class are written once, for all that it holds.
    owned: dict[str, list[str]] = {}
    for _, root, group in found:
        owner = _owner(root, group, known)
        if owner is not None:
            owned.setdefault(owner, []).extend(_labels(group))
    causes = []
    for (_, is_another, _), root, group in found:
        how = "is another one after a resume" if is_another else "begins anew after a resume"
        owner = _owner(root, group, known)
        text = _text_of_held(root, group, how)
        if owner is None:
            causes.append(Cause(text, lines_to_hold(root)))
        elif owner in owned:
            causes.append(Cause(text, lines_to_keep(owner, owned.pop(owner), known)))
        else:
            causes.append(Cause(f"{text} See what to write for {owner} above.", []))
    return causes


def _owner(root: str, group: list[Difference], known: Known) -> str | None:
    """The object whose state a group of values belongs to; None: that of a closure or a global."""
    match = OWNED.match(root)
    if match is None or "()'s " in root:
        return None
    return owner_of_label(bare_label(group[0].label), match["owner"], known)


def _known(wrong: list[Difference], undisturbed: Recording) -> Known:
    """What the undisturbed run tells of values when something differs."""
    facts = {}
    names: set[str] = set()
    for moment in {each.moment for each in wrong}:
        for name, entry in undisturbed.rows[moment].values.items():
            kind, _, label = name.partition(":")
            if kind == kinds.FACTS:
                facts[label] = facts_from(entry.shown)
            elif kind == kinds.HELD:
                names.add(label)
    start = _first_of_training(undisturbed)
    return Known(facts, names, {name.partition(":")[2] for name in start})


def _text_of_held(root: str, group: list[Difference], how: str) -> str:
    first = group[0]
    names = root if len(group) == 1 and first.label == root else _listed(_labels(group))
    return f"{root} changes in training and is not kept: it {how} ({names}: {_two(first)})."


def _skeleton_of_a_part(what: str) -> list[str]:
    return [
        "from unbroken import Part",
        "class Kept(Part):  # ExactCheckpoint(..., parts=[Kept()])",
        '    name = "kept"',
        "    def take(self, trainer):",
        f"        return ...  # what {what} holds, as numbers, texts and tensors",
        "    def give_back(self, trainer, value):",
        "        ...",
    ]


def _samples(wrong: list[Difference], undisturbed: Recording) -> list[Cause]:
    found: dict[str, Cause] = {}
    for each in wrong:
        if each.kind != kinds.SAMPLES:
            continue
        loader = ":".join(each.label.split(":")[:2])
        if loader in found:
            continue
        text = f"{_where(each)} get other samples{_row(each)}."
        twin = same_samples(undisturbed, each)
        if twin is not None:
            text += f" They are those of {_moment(twin)} of the undisturbed run."
        mend = [
            "# let a sample depend on its index and the epoch alone; give a stream, or a sampler",
            "# of your own, state_dict() and load_state_dict(), or a sampler set_epoch()",
        ]
        found[loader] = Cause(text, mend)
    return list(found.values())


def _random(wrong: list[Difference]) -> list[Cause]:
    found = []
    for each in wrong:
        if each.kind == kinds.RANDOM:
            text = f"{each.label} generator of random numbers is elsewhere{_drawn(each)}."
            mend = ["# draw in the training's steps, or from a generator that the module holds"]
            found.append(Cause(text, mend))
    return found


def _rates(wrong: list[Difference]) -> list[Cause]:
    found = []
    for each in wrong:
        if each.kind == kinds.RATE:
            text = f"{each.label} is {_two(each)}."
            mend = [
                "# change a rate in a schedule of configure_optimizers, whose state is kept, or in",
                "# on_train_batch_start as a function of self.global_step",
            ]
            found.append(Cause(text, mend))
    return found[:FEW]


def _optimizer(wrong: list[Difference], undisturbed: Recording) -> list[Cause]:
    found = [each for each in wrong if each.kind == kinds.OPTIMIZER]
    if not found:
        return []
    first = found[0]
    text = f"the optimizer's state is another one: {_listed(_labels(found))} ({_two(first)})."
    return [
        Cause(text, ["# keep it in optimizer.state, which state_dict() and load_state_dict() hold"])
    ]


def _weights(wrong: list[Difference], undisturbed: Recording, is_at_resume: bool) -> list[Cause]:
    found = [each for each in wrong if each.kind == kinds.WEIGHTS]
    if not found or not is_at_resume:
        return []
    names = _labels(found)
    text = f"weights or buffers are not restored: {_listed(names)}."
    return [Cause(text, ["# if it is a buffer: register_buffer(..., persistent=True)"])]


def _logged(wrong: list[Difference]) -> list[Cause]:
    found = [each for each in wrong if each.kind in REPORTED]
    if not found:
        return []
    names = _listed([f"{each.label} ({_two(each)})" for each in found])
    text = f"what is reported is another value, while samples and weights are the same: {names}."
    mend = [
        "# keep what the value is summed up from: a torchmetrics.Metric of the module, a buffer,"
    ]
    return [Cause(text, [*mend, "# or what on_save_checkpoint writes"])]


def _not_seen(undisturbed: Recording) -> list[Cause]:
    opaque: dict[str, str] = {}
    for row in undisturbed.rows.values():
        for name, entry in row.values.items():
            if name.startswith(f"{kinds.OPAQUE}:"):
                opaque[name.partition(":")[2]] = entry.shown
    seen = [f"{name} ({kind})" for name, kind in opaque.items()]
    held = f" These cannot be looked into: {_listed(seen)}." if seen else ""
    text = (
        "everything that can be seen was restored, and the run differs later: there is a state that"
        f" cannot be seen: in C++ code, a worker process, a file or a library.{held}"
    )
    return [Cause(text, _skeleton_of_a_part("it"))]


def _other_batches(comparison: Comparison) -> Cause:
    missing = comparison.only_in_one
    further = comparison.only_in_other
    parts = []
    if missing:
        parts.append(f"the resumed run lacks {_moment(missing[0])} ({len(missing)} in all)")
    if further:
        parts.append(f"the resumed run has further ones, first {_moment(further[0])}")
    return Cause(f"other batches: {' and '.join(parts)}.", ["# let a loader's length be the same"])


# Texts


def _root(label: str) -> str:
    label = bare_label(label)
    match = OWNED.match(label)
    if match is None or "()'s " in label:
        return re.split(r"[\[]", label)[0] if "()'s " not in label else label.partition("[")[0]
    return match[0]


def _labels(group: list[Difference]) -> list[str]:
    return [each.label for each in group]


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:FEW])
    return shown if len(names) <= FEW else f"{shown} and {len(names) - FEW} more"


def _two(each: Difference, word: str = "resumed") -> str:
    one = "missing" if each.one is None else each.one.shown
    other = "missing" if each.other is None else each.other.shown
    if one == other:
        return f"other values of {one}"
    return f"{one}, {word} {other}"


def _is_fresh(each: Difference, undisturbed: Recording) -> bool:
    """Whether the resumed run has the value with which a run begins."""
    fresh = _first_of_training(undisturbed).get(each.name)
    if each.other is None or fresh is None:
        return each.other is None and fresh is None
    return fresh.digest == each.other.digest


def _first_of_training(undisturbed: Recording) -> dict[str, Entry]:
    """The values with which a run begins."""
    for moment, row in undisturbed.rows.items():
        if moment[1] == "train":
            return row.values
    return {}


def _shape(shown: str) -> str:
    return shown if re.match(r"\w+ \(", shown) else ""


def _where(each: Difference) -> str:
    kind, loader, _ = each.label.split(":", 2)
    number = "" if loader == "0" else f" of loader {loader}"
    return f"{kind} batches{number}, from {_moment(each.moment)} on,"


def _row(each: Difference) -> str:
    if each.one is None or each.other is None or not each.one.rows or not each.other.rows:
        return ""
    pairs = list(zip(each.one.rows, each.other.rows, strict=False))
    differing = [place for place, (one, other) in enumerate(pairs) if one != other]
    if not differing:
        return f": {len(each.one.rows)} rows, resumed {len(each.other.rows)}"
    if sorted(each.one.rows) == sorted(each.other.rows):
        return f": the same ones in another order, first at row {differing[0]}"
    return f": {len(differing)} of {len(each.one.rows)} rows, first row {differing[0]}"


def _drawn(each: Difference) -> str:
    if each.one is None or each.other is None:
        return ""
    one_block, _, one = each.one.shown.partition(" ")
    other_block, _, other = each.other.shown.partition(" ")
    if one_block == other_block and one.isdigit() and other.isdigit():
        count = int(other) - int(one)
        how = "more" if count > 0 else "fewer"
        return f": the resumed run has drawn {abs(count)} numbers {how}"
    return ": it has another seed, or was drawn many numbers more or fewer"


def moment_text(moment: Moment) -> str:
    """A moment for a person."""
    return _moment(moment)


def _moment(moment: Moment) -> str:
    rank, kind, *rest = moment
    of_rank = f" (rank {rank})" if rank else ""
    if kind in ("train", "trained"):
        return f"epoch {rest[0] + 1}, batch {rest[1]}{of_rank}"
    if kind == "validation":
        return f"the validation at step {rest[0]}, batch {rest[2]}{of_rank}"
    texts = {
        "epoch": "the end of an epoch",
        "validated": "a validation's end",
        "end": "the training's end",
        "test": "the test",
        "tested": "the test's end",
        "files": "the run's files",
    }
    if kind == "epoch":
        return f"the end of epoch {rest[0] + 1}{of_rank}"
    if kind == "validated":
        return f"the end of the validation at step {rest[0]}{of_rank}"
    return f"{texts[kind]}{of_rank}"
