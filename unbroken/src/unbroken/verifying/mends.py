"""What to write so that a value is kept: lines of Python that work where they are pasted.

- The module's attributes are saved by ``on_save_checkpoint``, those of a callback, a data module,
  an optimizer, a stream and a sampler by ``state_dict``.
- Where a class defines these methods already, the lines are a subclass that calls them.
- What belongs to a class of a package, what a hook of the start sets again, and what Lightning
  cannot hold in such a place is kept by a :class:`unbroken.Part`.
- Objects are never saved whole: their attributes are, by name, or what their ``state_dict`` gives.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from unbroken.verifying import facts as forms
from unbroken.verifying.facts import Facts

# An attribute or an entry, as an expression of Python has it.
TOKEN = re.compile(r"\.[A-Za-z_]\w*|\[(?:'[^'\\]*'|\"[^\"\\]*\"|-?\d+)\]")
ROWS_OWNER = re.compile(r"(training|validation) data\[\d+\]\.\w+")
PART_OWNER = re.compile(r"(?P<what>optimizers|schedules)\[(?P<place>\d+)\]")
CALLBACK_OWNER = re.compile(r"callback (?P<kind>\w+)(?: (?P<number>\d+))?")
OF_CLASS = "class of "
# An object that gives its state by its state_dict
DECLARED = "declared"
# What a stream's or a sampler's state holds as it is, because the engine keeps that state.
# Elsewhere only the first is.
AS_THEY_ARE = (forms.BARE, forms.ARRAY, forms.QUEUE, forms.HELD_BY_ENGINE)
# Characters of a line that is pasted
LONGEST_LINE = 88
INDENT = "    "


@dataclass(frozen=True)
class Kept:
    """A value that is to be kept.

    Attributes:
        holder: What has it, below the owner, as an expression: ``.meter``, or empty for the owner.
        name: Its own part of the expression: ``.total`` or ``[0]``.
        form: How it is held.
        is_late: Whether it is not there when a run begins.
    """

    holder: str
    name: str
    form: str
    is_late: bool

    @property
    def path(self) -> str:
        return f"{self.holder}{self.name}"

    @property
    def key(self) -> str:
        return self.path.removeprefix(".")


@dataclass
class Found:
    """What is to be kept of an owner, and what cannot be."""

    kept: list[Kept] = field(default_factory=list)
    odd: list[str] = field(default_factory=list)
    # What only the resumed run has.
    new: list[str] = field(default_factory=list)
    # Data sets of rows that hold what differs.
    rows: list[str] = field(default_factory=list)
    # Objects that are not there when a run begins.
    late_objects: list[str] = field(default_factory=list)


class Known:
    """What a recording tells of values, by their names.

    Args:
        facts: Name → facts.
        names: Names of all values that are compared at the moment.
        names_at_start: The same when the run begins.
    """

    def __init__(self, facts: dict[str, Facts], names: set[str], names_at_start: set[str]) -> None:
        self._facts = facts
        self._names = names
        self._at_start = names_at_start

    def of(self, name: str) -> Facts | None:
        """The facts of a value; None: there is none of that name."""
        found = self._facts.get(name)
        if found is None and (name in self._names or f"len({name})" in self._names):
            return Facts(forms.BARE)
        return found

    def is_at_start(self, name: str) -> bool:
        """Whether a run begins with it."""
        return any(each in self._at_start for each in (name, f"len({name})", f"class of {name}"))


def bare_label(label: str) -> str:
    """The name of the value that a label says something of, such as its class or its length."""
    label = label.removeprefix(OF_CLASS)
    return label.removeprefix("len(").removesuffix(")") if label.startswith("len(") else label


def owner_of_label(label: str, owner: str, known: Known) -> str:
    """The object whose state a value belongs to: a stream or a sampler that the owner holds, or the
    owner itself.
    """
    prefix = owner
    for token in tokens_of(label, owner):
        prefix += token
        found = known.of(prefix)
        if found is not None and found.family in (forms.STREAM, forms.SAMPLER):
            return prefix
    return owner


def tokens_of(label: str, owner: str) -> list[str]:
    """The attributes and entries that lead from an owner to a value, as far as they are expressions
    of Python.
    """
    tokens = []
    rest = label.removeprefix(owner)
    while (match := TOKEN.match(rest)) is not None:
        tokens.append(match[0])
        rest = rest[match.end() :]
    return tokens


def what_to_keep(owner: str, labels: list[str], known: Known, engine_keeps: bool) -> Found:
    """Which values of an owner hold all that differs, the outermost that a checkpoint can hold."""
    found = Found()
    for label in labels:
        _add(found, owner, bare_label(label), known, engine_keeps)
    found.kept = list(dict.fromkeys(found.kept))
    # What an object gives as its state need not be taken by name as well.
    given = tuple(f"{each.path}." for each in found.kept if each.form == DECLARED)
    found.kept = [each for each in found.kept if not each.path.startswith(given)]
    return found


def _add(found: Found, owner: str, label: str, known: Known, engine_keeps: bool) -> None:
    if known.of(label) is None:
        found.new.append(label)
        return
    declaring = None
    holder = ""
    tokens = tokens_of(label, owner)
    for place, token in enumerate(tokens):
        path = f"{holder}{token}"
        facts = known.of(f"{owner}{path}") or Facts(forms.ODD)
        is_late = not known.is_at_start(f"{owner}{path}")
        is_read = facts.declares_state and _reads(facts, tokens[place + 1 :])
        if facts.family == forms.ROWS:
            found.rows.append(f"{owner}{path}")
            return
        if is_read or _is_held(facts.form, engine_keeps):
            form = DECLARED if is_read else facts.form
            found.kept.append(Kept(holder, token, form, is_late and not is_read))
            return
        if facts.declares_state and declaring is None:
            declaring = Kept(holder, token, DECLARED, False)
        if facts.form == forms.OBJECT and is_late:
            found.late_objects.append(path)
        holder = path
    if declaring is None:
        found.odd.append(label)
    else:
        found.kept.append(declaring)


def _is_held(form: str, engine_keeps: bool) -> bool:
    if form == forms.HELD_BY_ENGINE:
        return engine_keeps
    return form not in (forms.OBJECT, forms.ODD)


def _reads(facts: Facts, further: list[str]) -> bool:
    """Whether an object's ``state_dict`` has the attribute that leads on to a value."""
    names = set(facts.state_names)
    attribute = further[0].strip(".[]'") if further else ""
    return attribute in names or bool({"__dict__", "vars"} & names)


# The lines


def lines_to_keep(owner: str, labels: list[str], known: Known) -> list[str]:
    """What to write so that the values of an owner are kept.

    Args:
        owner: Such as ``module`` or ``callback Averages``.
        labels: The names of what differs.
        known: What the recording tells of them.
    """
    of_owner = known.of(owner) or Facts(forms.OBJECT)
    if owner.endswith(".state_dict()"):
        return ["# the state of a callback of Lightning is not given back: please report it"]
    is_of_data = ROWS_OWNER.match(owner) is not None
    if is_of_data and of_owner.family not in (forms.STREAM, forms.SAMPLER):
        return lines_for_rows(owner)
    engine_keeps = of_owner.family in (forms.STREAM, forms.SAMPLER)
    found = what_to_keep(owner, labels, known, engine_keeps)
    saved_already = [each for each in found.kept if _is_saved_by(of_owner, each)]
    kept = [each for each in found.kept if each not in saved_already]
    lines = [line for each in dict.fromkeys(found.rows) for line in lines_for_rows(each)]
    lines += lines_for_odd(found.odd)
    for each in saved_already:
        lines.append(f"# {of_owner.kind} saves {each.key} already: see whether it takes it back,")
        lines.append("# and whether something sets it again before the first batch")
    if not found.kept:
        lines += [f"# only a resumed run has {each}: find what makes it" for each in found.new]
    if not kept:
        return lines
    for path in dict.fromkeys(found.late_objects):
        lines.append(f"# make self{path} in __init__, so that it is there to get its values")
    first_names = {re.split(r"[.\[]", each.key)[0] for each in kept}
    is_set_again = bool(first_names & set(of_owner.set_at_start))
    if not engine_keeps and (is_set_again or not of_owner.is_users):
        return [*lines, *_part(owner, kept)]
    return [*lines, *_methods(owner, of_owner, kept, engine_keeps)]


def _methods(owner: str, of_owner: Facts, kept: list[Kept], engine_keeps: bool) -> list[str]:
    """Methods for the owner's class, or a subclass with them."""
    hooks = {"state_dict", "load_state_dict"}
    if owner == "module":
        hooks = {"on_save_checkpoint", "on_load_checkpoint"}
    is_super = bool(hooks & set(of_owner.all_hooks))
    if owner == "module":
        body = _hooks(of_owner.kind, kept, is_super)
    else:
        body = _state_dicts(kept, is_super, engine_keeps)
    if of_owner.is_users and not hooks & set(of_owner.own_hooks):
        return body
    head = f"class {of_owner.kind}Kept({of_owner.kind}):  # in place of {of_owner.kind}"
    return [head, *(f"{INDENT}{line}" for line in body)]


def _is_saved_by(owner: Facts, each: Kept) -> bool:
    """Whether an owner saves an attribute of its own, and no hook of the start sets it again."""
    is_own = not each.holder and each.form != DECLARED
    return is_own and each.key in set(owner.state_names) - set(owner.set_at_start)


def lines_to_hold(root: str) -> list[str]:
    """What to do so that what lies in a closure, a class or a global variable is kept.

    Args:
        root: Its name, such as ``mine.COUNT`` or ``module.further()'s noise``.
    """
    name = re.split(r"[. ]", root)[-1]
    return [
        f"# {name} lies in a closure, a class or a global variable. Make it in the module's",
        f"# __init__, as self.{name}, and use that: what a module holds is kept",
    ]


def lines_for_rows(owner: str) -> list[str]:
    """Advice for a map-style dataset or a collate function. Nobody knows when each is asked."""
    return [
        f"# {owner} is asked ahead, and by workers:",
        "# let a sample be a function of its index and the epoch alone, and a batch one of its",
        "# samples. Random numbers are drawn from torch, NumPy or random, which are seeded for",
        "# each batch. A cache may be kept, if its values are the same whenever they are made",
    ]


def lines_for_odd(odd: list[str]) -> list[str]:
    """Advice for what no checkpoint can hold."""
    if not odd:
        return []
    others = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
    return [
        f"# no file holds {odd[0]}{others} as it is:",
        "# keep the numbers, texts and tensors from which it is made anew",
    ]


def _hooks(kind: str, kept: list[Kept], is_super: bool) -> list[str]:
    upper = [f"{INDENT}super().on_save_checkpoint(checkpoint)"] if is_super else []
    upper_load = [f"{INDENT}super().on_load_checkpoint(checkpoint)"] if is_super else []
    saved = f'checkpoint["kept by {kind}"]'
    return [
        "def on_save_checkpoint(self, checkpoint):",
        *upper,
        *_literal(f"{saved} = ", _entries("self", kept, False)),
        "def on_load_checkpoint(self, checkpoint):",
        *upper_load,
        f"{INDENT}kept = {saved}",
        *_given_back("self", kept, "kept", False),
    ]


def _state_dicts(kept: list[Kept], is_super: bool, engine_keeps: bool) -> list[str]:
    upper = [["**super().state_dict()"]] if is_super else []
    upper_load = [f"{INDENT}super().load_state_dict(state)"] if is_super else []
    return [
        "def state_dict(self):",
        *_literal("return ", [*upper, *_entries("self", kept, engine_keeps)]),
        "def load_state_dict(self, state):",
        *upper_load,
        *_given_back("self", kept, "state", engine_keeps),
    ]


def _part(owner: str, kept: list[Kept]) -> list[str]:
    words = re.findall(r"\w+", owner)
    name = "".join(word[:1].upper() + word[1:] for word in words)
    held = f"{INDENT}held = {_found_by_trainer(owner)}"
    body = [
        f'name = "kept of {owner}"',
        "def take(self, trainer):",
        held,
        *_literal("return ", _entries("held", kept, False)),
        "def give_back(self, trainer, value):",
        held,
        *_given_back("held", kept, "value", False),
    ]
    return [
        "from unbroken import Part",
        f"class Kept{name}(Part):  # ExactCheckpoint(..., parts=[Kept{name}()])",
        *(f"{INDENT}{line}" for line in body),
    ]


def _found_by_trainer(owner: str) -> str:
    """The expression by which a Part finds an owner."""
    of_trainer = PART_OWNER.match(owner)
    if of_trainer is not None and of_trainer["what"] == "optimizers":
        return f"trainer.optimizers[{of_trainer['place']}]"
    if of_trainer is not None:
        return f"trainer.lr_scheduler_configs[{of_trainer['place']}].scheduler"
    callback = CALLBACK_OWNER.match(owner)
    if callback is not None:
        place = int(callback["number"] or 1) - 1
        kind = callback["kind"]
        return f'[each for each in trainer.callbacks if type(each).__name__ == "{kind}"][{place}]'
    return "trainer.datamodule" if owner == "data" else "trainer.lightning_module"


def _entries(base: str, kept: list[Kept], engine_keeps: bool) -> list[list[str]]:
    """The entries of the dictionary that is saved, of one or more lines each."""
    entries = []
    for each in kept:
        if not _is_looped(each):
            taken = _taken(f"{base}{each.path}", each.form, engine_keeps)
            entries.append([f'"{_quoted(each.key)}": {taken}'])
    for (holder, form), names in _loops(kept).items():
        held = f"{base}{holder}"
        listed = ", ".join(f'"{name}"' for name in names) + ("," if len(names) == 1 else "")
        entries.append(
            [
                f'"{_key_of_loop(holder, form)}": {{',
                f"{INDENT}name: {_taken(f'getattr({held}, name)', form, engine_keeps)}",
                f"{INDENT}for name in ({listed})",
                f"{INDENT}if hasattr({held}, name)",
                "}",
            ]
        )
    return entries


def _given_back(base: str, kept: list[Kept], saved: str, engine_keeps: bool) -> list[str]:
    lines = []
    for each in kept:
        if not _is_looped(each):
            value = f'{saved}["{_quoted(each.key)}"]'
            lines += _given(f"{base}{each.path}", each.form, value, engine_keeps)
    for holder, form in _loops(kept):
        is_array = form == forms.ARRAY and not engine_keeps
        lines.append(f'for name, each in {saved}["{_key_of_loop(holder, form)}"].items():')
        value = "each.numpy()" if is_array else "each"
        lines.append(f"{INDENT}setattr({base}{holder}, name, {value})")
    return [f"{INDENT}{line}" for line in lines]


def _is_looped(each: Kept) -> bool:
    """Whether a value is one of several attributes of an object, or may not be there yet."""
    is_attribute = each.name.startswith(".")
    is_taken = each.form in (forms.BARE, forms.ARRAY)
    return is_attribute and is_taken and (bool(each.holder) or each.is_late)


def _loops(kept: list[Kept]) -> dict[tuple[str, str], list[str]]:
    loops: dict[tuple[str, str], list[str]] = {}
    for each in kept:
        if _is_looped(each):
            loops.setdefault((each.holder, each.form), []).append(each.name.removeprefix("."))
    return loops


def _key_of_loop(holder: str, form: str) -> str:
    what = "arrays" if form == forms.ARRAY else "attributes"
    return _quoted(f"{what} of {holder.removeprefix('.')}" if holder else what)


def _quoted(text: str) -> str:
    return text.replace('"', "'")


def _taken(value: str, form: str, engine_keeps: bool) -> str:
    """The expression that takes a value."""
    if form in AS_THEY_ARE and engine_keeps:
        return value
    ways: dict[str, str] = {
        forms.ARRAY: f"torch.from_numpy({value}.copy())",
        forms.QUEUE: f"list({value})",
        forms.TORCH_GENERATOR: f"{value}.get_state()",
        forms.NUMPY_GENERATOR: f"{value}.bit_generator.state",
        forms.PYTHON_GENERATOR: f"{value}.getstate()",
        DECLARED: f"{value}.state_dict()",
    }
    return ways.get(form, value)


def _given(value: str, form: str, saved: str, engine_keeps: bool) -> list[str]:
    """The lines that give a value back."""
    if form in AS_THEY_ARE and engine_keeps:
        return [f"{value} = {saved}"]
    ways: dict[str, list[str]] = {
        forms.ARRAY: [f"{value} = {saved}.numpy()"],
        forms.QUEUE: [f"{value}.clear()", f"{value}.extend({saved})"],
        forms.TORCH_GENERATOR: [f"{value}.set_state({saved})"],
        forms.NUMPY_GENERATOR: [f"{value}.bit_generator.state = {saved}"],
        forms.PYTHON_GENERATOR: [f"{value}.setstate({saved})"],
        DECLARED: [f"{value}.load_state_dict({saved})"],
    }
    return ways.get(form, [f"{value} = {saved}"])


def _literal(head: str, entries: list[list[str]]) -> list[str]:
    """A dictionary, on one line if it fits."""
    if all(len(each) == 1 for each in entries):
        line = f"{INDENT}{head}{{{', '.join(each[0] for each in entries)}}}"
        if len(line) <= LONGEST_LINE:
            return [line]
    lines = [f"{INDENT}{head}{{"]
    for entry in entries:
        lines += [f"{INDENT}{INDENT}{line}" for line in entry]
        lines[-1] += ","
    return [*lines, f"{INDENT}}}"]
