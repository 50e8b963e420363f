"""Why two recordings differ, as far as it can be told, and what to write."""

from __future__ import annotations

import re
from dataclasses import dataclass

from unbroken.verifying import recorder as kinds
from unbroken.verifying.differences import Comparison, Difference, same_samples, that_matter
from unbroken.verifying.recordings import Moment, Recording

# The owner of a value, and the attribute of it that holds the value
OWNED = re.compile(
    r"(?P<owner>module|data|callback \w+( \d+)?|optimizers\[\d+\]|schedules\[\d+\] \w+"
    r"|\w+ data\[\d+\]\.\w+)(?P<attribute>\.\w+|\['\w+'\])?"
)
# Names that are told of a group of values.
FEW = 3
OF_CLASS = "class of "
KEEPS_STATE = " with state_dict"
# What is told of a run, and nothing that it trains on.
REPORTED = {kinds.LOGGED, kinds.BEST, kinds.TEST}

PLAIN_ALONE = (
    "# numbers, texts, tensors, and lists and dictionaries of these: a file holds nothing else"
)


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
    found += growth(undisturbed) if at_resume else []
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
        "    # make here what training has added, before its weights are loaded",
    ]
    return [Cause(text, mend)]


def _not_kept(wrong: list[Difference], undisturbed: Recording) -> list[Cause]:
    groups: dict[str, list[Difference]] = {}
    for each in wrong:
        if each.kind == kinds.HELD:
            groups.setdefault(_root(each.label), []).append(each)
    found = []
    for root, group in groups.items():
        begins_anew = any(_is_fresh(each, undisturbed) for each in group)
        # An attribute is likelier than a global variable, which a library may keep for itself.
        is_global = OWNED.match(root) is None
        cause = _cause_of_held(root, group, undisturbed, begins_anew)
        # One that is soon what it was is likely filled when it is first needed.
        is_brief = not any(each.lasts for each in group)
        found.append((is_brief, not begins_anew, is_global, cause))
    found.sort(key=lambda each: each[:3])
    return [each[3] for each in found]


def _cause_of_held(
    root: str, group: list[Difference], undisturbed: Recording, begins_anew: bool
) -> Cause:
    first = group[0]
    names = root if len(group) == 1 and group[0].label == root else _listed(_labels(group))
    how = "begins anew after a resume" if begins_anew else "is another one after a resume"
    text = f"{root} changes in training and is not kept: it {how} ({names}: {_two(first)})."
    declared = _declares_state(root, group, undisturbed)
    if declared is not None:
        return Cause(text, lines_for(declared, group, KEEPS_STATE))
    return Cause(text, lines_for(root, group, _class_of(root, first.moment, undisturbed)))


def _declares_state(root: str, group: list[Difference], undisturbed: Recording) -> str | None:
    """The object below an attribute that has a state_dict and holds what differs, such as
    ``module.engine.accountant``; None where there is none.
    """
    first = group[0]
    paths = []
    for name, entry in undisturbed.rows[first.moment].values.items():
        path = name.removeprefix(f"{kinds.HELD}:{OF_CLASS}")
        is_below = path != name and path.startswith(root)
        if is_below and entry.shown.endswith(KEEPS_STATE) and re.fullmatch(r"[\w.]+", path):
            paths.append(path)
    holds = [path for path in paths if any(_is_in(each.label, path) for each in group)]
    return min(holds, key=len, default=None)


def _is_in(label: str, path: str) -> bool:
    return label.removeprefix("len(").startswith(f"{path}.")


def lines_for(root: str, group: list[Difference], kind: str) -> list[str]:
    """What to write so that a value is kept.

    Args:
        root: The attribute that holds it, such as ``module.queue``.
        group: Its differences.
        kind: The class of the object that the attribute is, or an empty text.
    """
    match = OWNED.match(root)
    owner = match["owner"] if match else ""
    attribute = (match["attribute"] or "").strip(".[]'") if match else ""
    if match and kind == KEEPS_STATE:
        # The object that declares its state may lie deeper.
        attribute = root.removeprefix(f"{owner}.")
    shown = group[0].one.shown if group[0].one else ""
    if "()'s " in root or not match:
        name = root.rpartition("'s ")[2].rpartition(".")[2]
        return [
            f"# {name} lies in a closure, a class or a global variable: let the module hold it, as",
            f"self.{name} = ...",
            *_saved(name, "", "generator" in shown),
        ]
    if owner.endswith((".dataset", ".collate_fn", ".sampler", ".batch_sampler")):
        return [
            "# let a sample be a function of its index alone; give a stream these two methods",
            "def state_dict(self):",
            f"    return {{{attribute!r}: self.{attribute}}}",
            "def load_state_dict(self, state):",
            f"    self.{attribute} = state[{attribute!r}]",
        ]
    if owner.startswith("optimizers"):
        return [
            "# in the optimizer: keep it in self.state[weight], which its state_dict() holds, or",
            "def state_dict(self):",
            f"    return {{**super().state_dict(), {attribute!r}: self.{attribute}}}",
            "def load_state_dict(self, state):",
            f"    self.{attribute} = state.pop({attribute!r})",
            "    super().load_state_dict(state)",
        ]
    is_tensor = re.match(r"(float|bfloat|int|uint|bool|complex)\d* \(", shown) is not None
    if owner == "module" and is_tensor and group[0].label == root:
        return [f'self.register_buffer("{attribute}", self.{attribute})  # in __init__']
    if owner.startswith("callback ") or owner == "data":
        return _state_dict_lines(attribute, kind, "generator" in shown)
    if owner == "module":
        return _saved(attribute, kind, "generator" in shown)
    return _part(root)


def _saved(name: str, kind: str, is_generator: bool) -> list[str]:
    take, give = _take_and_give(name, kind, is_generator, f'checkpoint["{name}"]')
    return [
        PLAIN_ALONE,
        "def on_save_checkpoint(self, checkpoint):",
        f'    checkpoint["{name}"] = {take}',
        "def on_load_checkpoint(self, checkpoint):",
        f"    {give}",
    ]


def _state_dict_lines(name: str, kind: str, is_generator: bool) -> list[str]:
    take, give = _take_and_give(name, kind, is_generator, f'state["{name}"]')
    return [
        PLAIN_ALONE,
        "def state_dict(self):",
        f'    return {{"{name}": {take}}}',
        "def load_state_dict(self, state):",
        f"    {give}",
    ]


def _take_and_give(name: str, kind: str, is_generator: bool, saved: str) -> tuple[str, str]:
    if is_generator:
        return f"self.{name}.get_state()", f"self.{name}.set_state({saved})"
    if kind.endswith(KEEPS_STATE):
        return f"self.{name}.state_dict()", f"self.{name}.load_state_dict({saved})"
    if kind:
        return f"vars(self.{name})", f"vars(self.{name}).update({saved})"
    return f"self.{name}", f"self.{name} = {saved}"


def _part(root: str) -> list[str]:
    return [
        "class Kept(unbroken.Part):  # ExactCheckpoint(..., parts=[Kept()])",
        '    name = "kept"',
        "    def take(self, trainer):",
        f"        return ...  # what {root} holds, as plain values",
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
    lines = []
    for name in names[:FEW]:
        last = name.rpartition(".")[2]
        lines.append(f'self.register_buffer("{last}", ..., persistent=True)  # {name}, if a buffer')
    text = f"weights or buffers are not restored: {_listed(names)}."
    return [Cause(text, lines)]


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
    return [Cause(text, _part("it"))]


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
    label = label.removeprefix(OF_CLASS)
    label = label.removeprefix("len(").removesuffix(")") if label.startswith("len(") else label
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
    row = next((row for at, row in undisturbed.rows.items() if at[1] == "train"), None)
    if row is None:
        return False
    fresh = row.values.get(each.name)
    if each.other is None or fresh is None:
        return each.other is None and fresh is None
    return fresh.digest == each.other.digest


def _class_of(root: str, moment: Moment, undisturbed: Recording) -> str:
    entry = undisturbed.rows[moment].values.get(f"{kinds.HELD}:{OF_CLASS}{root}")
    return "" if entry is None else entry.shown


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
