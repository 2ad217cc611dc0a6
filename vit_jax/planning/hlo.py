"""Parser of optimized TPU HLO: operations of a step, how often they run, and estimated cycles.

The TPU compiler estimates the cycles of each operation, and writes them into the operation's
`backend_config`. It does not estimate kernels; ours have cycles and FLOPs in their metadata.
Operations in a loop are counted once per iteration. If the number of iterations depends on the
data, as in the matching of detections, they are counted only once. Of the branches of a conditional
only the one with the most cycles is counted, so that the estimate is an upper bound.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from vit_jax.models.attention import SCORES, VALUES
from vit_jax.models.model_card import count_taps

# Named scopes in `training/step.py`.
SCOPES = ("augmentation", "gradients", "loss", "optimizer", "objective_state")
# Kind of a loop whose number of iterations depends on the data.
UNKNOWN_LOOP = "loop of unknown length"
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128}
_BITS |= {f"{kind}{bits}": bits for kind in "suf" for bits in (4, 8, 16, 32, 64)}


@dataclass(frozen=True)
class Operation:
    """One operation of a step on one device.

    `cycles`, `flops`, `sent`, `traffic` and `schedule` are for a single execution. In a loop, an
    operation is executed several times in a step.
    """

    name: str
    kind: str  # HLO opcode: fusion, convolution, all-reduce, ...
    source: str  # Name in JAX, such as jit(train_step)/transpose(jvp())/dot_general.
    part: str  # Class, function or scope of vit_jax: Attention, Mlp, optimizer, ...
    times: int = 1  # Number of executions in a step.
    cycles: int = 0  # The compiler's estimate.
    flops: int = 0  # FLOPs of the operation's matrix products and convolutions.
    # Bytes that a collective sends: its inputs or its outputs, whichever are larger.
    sent: int = 0
    # Bytes of all operands and results in HBM, with padding. 0 for asynchronous operations.
    traffic: int = 0
    schedule: int = 0  # Cycles of its instructions (planning/schedule.py), if they were read.


def total(operations: Iterable[Operation], value: str) -> int:
    """Returns the sum of `cycles`, `flops` or `sent` over all operations of a step."""
    return sum(operation.times * getattr(operation, value) for operation in operations)


def by(operations: Iterable[Operation], key: str, value: str) -> dict[str, int]:
    """Returns the sum of a value in each group of a step's operations, in descending order.

    Args:
      key: attribute that groups the operations: `part` (component of vit_jax, such as `Mlp`) or
        `kind` (HLO opcode, such as `fusion`).
      value: `cycles`, `flops` or `sent`.
    """
    sums = Counter()
    for operation in operations:
        sums[getattr(operation, key)] += operation.times * getattr(operation, value)
    return {name: count for name, count in sums.most_common() if count}


def read_operations(text: str, every: bool = False) -> list[Operation]:
    """Returns those operations of an HLO module that take time.

    They are operations with cycles, FLOPs or bytes to send. A loop with an unknown number of
    iterations is returned as an operation of the kind `UNKNOWN_LOOP`.

    Args:
      text: result of `compiled.as_text()`.
      every: also returns all other operations, such as reshapes, which the compiler does not
        estimate, and parameters.
    """
    module = _Module(text)
    operations, seen = [], set()
    for times, instruction in module.walk(module.entry):
        # The compiler copies a kernel's metadata to its results.
        if instruction.opcode == "get-tuple-element":
            continue
        kind, sent = module.kind(instruction), 0
        for name, inner in module.collectives(instruction):
            key = _identity(name, inner, instruction)
            if key not in seen:
                seen.add(key)
                kind, sent = name, sent + module.payload(inner)
        cycles, flops = _cycles(instruction), module.flops(instruction)
        if every or cycles or flops or sent or kind == UNKNOWN_LOOP:
            source, part = _source(instruction), module.part(instruction)
            values = times, cycles, flops, sent, module.traffic(instruction)
            operations.append(Operation(instruction.name, kind, source, part, *values))
    return operations


@dataclass
class _Instruction:
    name: str
    shape: str
    opcode: str
    rest: str  # Text of operands and attributes.
    operands: list[str]
    root: bool


def _identity(kind: str, collective: _Instruction, operation: _Instruction) -> str:
    """Returns a text that identifies a collective of an operation within a module.

    A collective that overlaps with several fusions occurs in each of these fusions, with the same
    channel. It is identified by this channel, so that it is counted once. Different permutes of one
    `shard_map` also have the same channel. A permute outside of fusions is therefore identified by
    its name.
    """
    channel = re.search(r"channel_id=(\d+)", collective.rest)
    if channel is None or (kind == "collective-permute" and collective is operation):
        return collective.name
    return channel[1]


@dataclass
class _Computation:
    instructions: dict[str, _Instruction] = field(default_factory=dict)

    @property
    def root(self) -> _Instruction:
        return next(x for x in self.instructions.values() if x.root)


class _Module:
    """An HLO module: its computations by name, and the tables with source files of operations."""

    def __init__(self, text: str):
        self.computations: dict[str, _Computation] = {}
        self.tables: dict[str, dict[int, str]] = {}
        computation = table = None
        # The metadata of a kernel, in one line as all other attributes.
        text = re.sub(r'\{\n"[^{}]*\}', lambda found: found[0].replace("\n", ""), text)
        for line in text.splitlines():
            if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
                table = self.tables.setdefault(line, {})
            elif table is not None and line[:1].isdigit():
                number, entry = line.split(" ", 1)
                table[int(number)] = entry.strip('"')
            elif line.endswith("{") and (header := re.match(r"(ENTRY )?%?([\w.-]+) ?\(", line)):
                table, computation = None, self.computations.setdefault(header[2], _Computation())
                if header[1]:
                    self.entry = header[2]
            elif line.startswith("  ") and computation is not None:
                instruction = _parse(line)
                computation.instructions[instruction.name] = instruction
        self._of = {id(x): c for c in self.computations.values() for x in c.instructions.values()}

    def walk(self, name: str, times: int = 1) -> Iterator[tuple[int, _Instruction]]:
        """Yields (number of executions, operation) for a computation and all computations it calls.

        Of a conditional, only the branch with the most cycles is included. `times` is the number of
        executions of the computation in a step.
        """
        for instruction in self.computations[name].instructions.values():
            yield times, instruction
            if instruction.opcode == "while":
                turns = self.turns(instruction) or 1
                for inner in _called(instruction, "condition", "body"):
                    yield from self.walk(inner, times * turns)
            elif instruction.opcode == "conditional":
                names = "true_computation", "false_computation", "branch_computations"
                branches = (list(self.walk(x, times)) for x in _called(instruction, *names))
                yield from max(branches, key=self._costs, default=())
            elif instruction.opcode in ("call", "async-start"):
                for inner in _called(instruction, "to_apply", "calls"):
                    yield from self.walk(inner, times)

    def _costs(self, operations: Sequence[tuple[int, _Instruction]]) -> tuple[int, int]:
        """Returns the cycles and the FLOPs of operations with their numbers of executions."""
        cycles = sum(times * _cycles(x) for times, x in operations)
        return cycles, sum(times * self.flops(x) for times, x in operations)

    def kind(self, instruction: _Instruction) -> str:
        """Returns the opcode, or `UNKNOWN_LOOP` if the number of iterations is unknown."""
        unknown = instruction.opcode == "while" and self.turns(instruction) is None
        return UNKNOWN_LOOP if unknown else instruction.opcode

    def turns(self, loop: _Instruction) -> int | None:
        """Returns a loop's number of iterations; None: unknown.

        The number is known if the compiler has stored it (`known_trip_count`), or if the loop has a
        counter that runs from 0 to a constant.
        """
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest):
            return int(known[1])
        (condition,), (body,) = _called(loop, "condition"), _called(loop, "body")
        condition, body = self.computations[condition], self.computations[body]
        test = condition.root
        if test.opcode != "compare" or "direction=LT" not in test.rest:
            return None
        limits = [self._constant(condition, name) for name in test.operands]
        index = _first_index([condition.instructions[name] for name in test.operands])
        if limits[1] is None or index is None:
            return None
        following = body.instructions[body.root.operands[index]]
        if following.opcode != "add":
            return math.ceil(limits[1])
        steps = [self._constant(body, name) for name in following.operands]
        return math.ceil(limits[1] / next((step for step in steps if step is not None), 1))

    def collectives(self, instruction: _Instruction) -> Iterator[tuple[str, _Instruction]]:
        """Yields (kind, instruction) for each collective of an operation.

        The operation may be a collective itself, or a fusion that contains collectives.
        """
        for kind in COLLECTIVES:
            if instruction.opcode in (kind, f"{kind}-start"):
                yield kind, instruction
        if instruction.opcode == "fusion":
            for name in _called(instruction, "calls"):
                for inner in self.computations[name].instructions.values():
                    for kind, collective in self.collectives(inner):
                        yield "reduce-scatter" if "all-reduce-scatter" in name else kind, collective

    def payload(self, collective: _Instruction) -> int:
        """Returns the bytes of a collective's inputs or outputs, whichever are larger."""
        shapes = self._of[id(collective)].instructions
        taken = sum(_bytes(shapes[name].shape) for name in collective.operands)
        given = _bytes(collective.shape) - (taken if collective.opcode.endswith("-start") else 0)
        return max(taken, given)

    def traffic(self, instruction: _Instruction) -> int:
        """Returns the bytes of an operation's operands and results in HBM, with padding.

        Asynchronous operations overlap with others, so their result is 0.
        """
        if re.search(r"^async-|-start$|-done$", instruction.opcode):
            return 0
        shapes = self._of[id(instruction)].instructions
        operands = [shapes[name].shape for name in instruction.operands if name in shapes]
        return sum(map(_padded_bytes, [instruction.shape, *operands]))

    def flops(self, instruction: _Instruction) -> int:
        """Returns the FLOPs of an operation's matrix products and convolutions.

        In convolutions, products of padding zeros are not counted.
        """
        if instruction.opcode == "fusion":
            return sum(
                self.flops(inner)
                for name in _called(instruction, "calls")
                for inner in self.computations[name].instructions.values()
            )
        if kernel := re.search(r'kernel_metadata=\{[^}]*"flops":"(\d+)"', instruction.rest):
            return int(kernel[1])
        if instruction.opcode not in ("convolution", "dot"):
            return 0
        shapes = self._of[id(instruction)].instructions
        left, right = (_dimensions(shapes[name].shape) for name in instruction.operands[:2])
        out = _dimensions(instruction.shape)
        if instruction.opcode == "convolution":
            return _convolution_flops(left, right, out, instruction.rest)
        axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.rest)[1]
        return 2 * math.prod(out) * math.prod(left[axis] for axis in _whole(axes))

    def part(self, instruction: _Instruction) -> str:
        """Returns the class, function or scope of vit_jax to which an operation belongs.

        The result is the first of these names that exists: the named scope of the matrix products
        in attention; the class or function in `vit_jax/models` that computes the operation; the
        named scope in the training step (`SCOPES`); `other`.
        """
        source = _source(instruction)
        if scope := re.search(rf"\b({SCORES}|{VALUES})\b", source):
            return scope[1]
        frame_id = re.search(r"stack_frame_id=(\d+)", instruction.rest)
        frame = int(frame_id[1]) if frame_id else 0
        while frame:
            location, parent = _numbers(self.tables["StackFrames"][frame])
            frame = parent - 1  # A stored parent ID is larger by one; 0 means no parent.
            file, function, *_ = _numbers(self.tables["FileLocations"][location])
            file, function = self.tables["FileNames"][file], self.tables["FunctionNames"][function]
            if "/vit_jax/models/" in file and not file.endswith("layers.py"):
                return function.split(".<locals>")[0].removesuffix(".__call__")
        scopes = re.findall(rf"(?<![\w.])({'|'.join(SCOPES)})(?![\w.])", source)
        return scopes[-1] if scopes else "other"

    def _constant(self, computation: _Computation, name: str) -> int | None:
        instruction = computation.instructions[name]
        number = re.match(r"(-?\d+)\)", instruction.rest)
        return int(number[1]) if instruction.opcode == "constant" and number else None


def _first_index(instructions: list[_Instruction]) -> int | None:
    """Returns the tuple index of the first `get-tuple-element`; None: there is no such element."""
    for instruction in instructions:
        if instruction.opcode == "get-tuple-element":
            match = re.search(r"index=(\d+)", instruction.rest)
            return int(match[1]) if match else None
    return None


def _convolution_flops(
    left: Sequence[int], right: Sequence[int], out: Sequence[int], attributes: str
) -> int:
    """Returns the FLOPs of a convolution, without products of padding zeros.

    `left`, `right` and `out` are the shapes of the images, the kernel and the result. `attributes`
    is the text of the instruction with `dim_labels` and `window`.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", attributes).groups()
    left_by, right_by, out_by = (
        dict(zip(names, shape, strict=True))
        for names, shape in zip(labels, (left, right, out), strict=True)
    )
    products = out_by["b"] * out_by["f"] * right_by["i"]
    window = re.search(r"window=\{([^}]*)\}", attributes)
    window = dict(part.split("=") for part in window[1].split()) if window else {}
    for axis in sorted(set(left_by) - set("bf")):
        at = int(axis)
        stride, left_dilation, right_dilation = (
            int(window[name].split("x")[at]) if name in window else 1
            for name in ("stride", "lhs_dilate", "rhs_dilate")
        )
        before = int(window["pad"].split("x")[at].split("_")[0]) if "pad" in window else 0
        sizes = left_by[axis], right_by[axis], out_by[axis]
        products *= count_taps(*sizes, stride, before, left_dilation, right_dilation)
    return 2 * products


def _parse(line: str) -> _Instruction:
    """Parses ` ROOT %name = shape opcode(operands), attributes`; the shape may be a tuple."""
    head, body = line.strip().split(" = ", 1)
    end = body.index(" ")
    while body.count("(", 0, end) != body.count(")", 0, end):
        end = body.index(" ", end + 1)
    opcode, _, rest = body[end + 1 :].partition("(")
    operands = re.findall(r"%([\w.-]+)", rest[: rest.find(")")])
    name, root = head.removeprefix("ROOT ").lstrip("%"), head.startswith("ROOT ")
    return _Instruction(name, body[:end], opcode, rest, operands, root)


def _called(instruction: _Instruction, *attributes: str) -> list[str]:
    """Returns the names of the computations in an instruction's attributes, such as `body`."""
    names = []
    for attribute in attributes:
        if found := re.search(rf"\b{attribute}=(\{{[^}}]*\}}|%?[\w.-]+)", instruction.rest):
            names += re.findall(r"[\w.-]+", found[1])
    return names


def _source(instruction: _Instruction) -> str:
    """Returns the name of an instruction in JAX; empty: there is none."""
    named = re.search(r'op_name="([^"]*)"', instruction.rest)
    return named[1] if named else ""


def _cycles(instruction: _Instruction) -> int:
    """Returns the compiler's estimate for one execution of an instruction; 0: there is none."""
    cycles = re.search(r'"(?:estimated_)?cycles":"(\d+)"', instruction.rest)
    return int(cycles[1]) if cycles else 0


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"=(\d+)", text)]


def _dimensions(shape: str) -> list[int]:
    """Parses the shape of an array: `bf16[32,197]{1,0:T(8,128)}` is [32, 197]."""
    return _whole(re.search(r"\[([\d,]*)\]", shape)[1])


def _whole(text: str) -> list[int]:
    """Parses whole numbers that are separated by commas."""
    return [int(number) for number in text.split(",") if number]


def _bytes(shape: str) -> int:
    """Returns the bytes of an array, or of all arrays in a tuple, without padding."""
    arrays = re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", shape)
    return sum(_BITS.get(kind, 8) * math.prod(_whole(sizes)) // 8 for kind, sizes in arrays)


def _padded_bytes(shape: str) -> int:
    """Returns the bytes of an array, or of all arrays in a tuple, with padding to tiles.

    Arrays outside of HBM are not counted: their layout contains a memory space, such as `S(1)`.
    """
    count = 0
    for kind, sizes, layout in re.findall(r"\b([a-z]\w*)\[([\d,]*)\](?:\{([^{}]*)\})?", shape):
        if kind not in _BITS or re.search(r"S\([1-9]", layout):
            continue
        sizes, order = _whole(sizes), _whole(layout.partition(":")[0])
        tile = re.search(r"T\(([\d,]+)\)", layout)
        tile = _whole(tile[1]) if tile else []
        # The layout lists the axes from the fastest to the slowest, the tile in reverse.
        for axis, size in zip(order, reversed(tile), strict=False):
            sizes[axis] = math.ceil(sizes[axis] / size) * size
        count += math.prod(sizes) * _BITS[kind] // 8
    return count
