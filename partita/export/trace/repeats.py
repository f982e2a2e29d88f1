"""Repeated layers: the nodes of a layer that are copied from an earlier one.

torch traces a layer in 0.3 s. Two layers repeat when they differ only in their index, and recorded the same nodes in a
row, each with its own inputs, parameters and states. The nodes of the next such layer are copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch._C import DisableTorchFunction
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Node, Proxy
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    track_tensor_tree,
)
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from transformers.cache_utils import Cache

from partita.export.progress import Stage
from partita.export.trace.emitter import Emitter, Key, Written
from partita.export.trace.hooks import active_plug
from partita.export.trace.replacements import replace_forward

OF_TORCH = frozenset({*vars(torch.nn.Module()), "forward"})
"""Attributes of a module that are compared in another way, or not at all."""
PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
STACK = "nn_module_stack"
"""torch's record of the modules around a node."""


def layers(model: torch.nn.Module) -> tuple[torch.nn.Module, ...]:
    """The layers of a model: the longest list of modules that is not inside another list, as experts are."""
    lists: dict[str, tuple[torch.nn.Module, ...]] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and not name.startswith(tuple(f"{outer}." for outer in lists)):
            lists[name] = tuple(module)
    return max(lists.values(), key=len, default=())


@contextmanager
def copied_repeats(model: torch.nn.Module, progress: Stage) -> Iterator[None]:
    """In this block a layer of `model` that repeats an earlier one is copied from it; `progress` counts layers."""
    repeats = _Repeats(progress)
    with ExitStack() as stack:
        for layer in layers(model):
            stack.enter_context(replace_forward(layer, partial(repeats.call, layer, layer.forward)))
        yield


_Traced = tuple[Any, Node | None]
"""A value, and its node at a time: where an operation returns its input, that gets another node."""


@dataclass(slots=True)
class _Call:
    """One call of a layer, and what it recorded."""

    path: str
    """In the trace."""
    form: object
    """Of the arguments: equal for layers that may repeat."""
    facts: dict[tuple[str, str], object]
    inputs: list[_Traced]
    """Arguments, parameters and buffers, before the call."""
    nodes: list[Node] = field(default_factory=list)
    written: dict[Any, Any] = field(default_factory=dict)
    """Changed entries of the plug: `Written` by layer of the cache, other states by key."""
    last_state: torch.Tensor | None = None
    output: Any = None
    made: dict[int, Node | None] = field(default_factory=dict)
    """Identity of a tensor in these three -> its node after the call."""
    can_repeat: bool = False
    """Nothing else was changed, and every node can be copied."""
    repeats: bool = False
    """It recorded the same nodes as the layer before."""

    @property
    def cached(self) -> set[int]:
        """The layers of the cache that it wrote."""
        return {key if isinstance(key, int) else key[1] for key in self.written}


class _Repeats:
    """The last call of each kind of layer in one trace."""

    def __init__(self, progress: Stage) -> None:
        self.progress = progress
        self.calls: list[_Call] = []
        self.past: dict[Key, _Traced] = {}
        """The states before the step."""

    def call(self, layer: torch.nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The output of `layer`, whose nodes are traced or copied."""
        self.progress.advance(1)
        mode, plug = get_proxy_mode(), active_plug()
        arguments, tree = tree_flatten((args, kwargs))
        if mode is None or not isinstance(plug, Emitter) or not _can_match(arguments, (*args, *kwargs.values())):
            return forward(*args, **kwargs)
        trace = partial(_traced, mode.tracer)
        self.past = self.past or {key: trace(each) for key, each in plug.past.items()}
        inputs = [trace(each) for each in (*arguments, *layer.parameters(), *layer.buffers())]
        path = next(reversed(mode.tracer.module_stack.values()))[0]
        now = _Call(path, (tree, [_form(each) for each in arguments]), _facts(layer), inputs)
        before = next((each for each in self.calls if each.form == now.form and _indices(each, now) is not None), None)
        pair = None if before is None else _Pair(mode.tracer, plug, before, now)
        if pair is not None and pair.before.repeats and pair.match(self.past):
            return pair.copy()
        _record(now, partial(forward, *args, **kwargs), mode.tracer, plug)
        unchanged = [id(each) for each in tree_flatten((args, kwargs))[0]] == [id(each) for each in arguments]
        if now.can_repeat and unchanged and _differences(now.facts, _facts(layer)) == set():
            now.repeats = pair is not None and pair.match(self.past) and pair.is_same()
            self.calls = [each for each in self.calls if each is not before] + [now]
        return now.output


def _can_match(flat: list[Any], arguments: Iterable[Any]) -> bool:
    """Whether arguments contain nothing in which a layer may look for its own index, but the cache."""
    indexed = any(isinstance(each, dict) and not all(isinstance(key, str) for key in each) for each in arguments)
    return not indexed and all(isinstance(each, (torch.Tensor, Cache, *PLAIN)) for each in flat)


def _form(argument: Any) -> object:
    """What the arguments of two calls share where the second may repeat the first."""
    if isinstance(argument, torch.Tensor):
        with DisableTorchFunction():  # the trace records reads of a size
            return argument.dtype, str(argument.shape), str(argument.stride())
    return (type(argument), argument) if isinstance(argument, PLAIN) else id(argument)


def _facts(layer: torch.nn.Module) -> dict[tuple[str, str], object]:
    """Classes and attributes of a layer, and the forms of its parameters and buffers, by module and name."""
    facts: dict[tuple[str, str], object] = {}
    for path, module in layer.named_modules():
        facts[path, ""] = type(module)
        facts |= {(path, name): value for name, value in vars(module).items() if name not in OF_TORCH}
        facts |= {(path, name): _form(each) for name, each in (module._parameters | module._buffers).items()}
    return facts


def _differences(old: Mapping[Any, object], new: Mapping[Any, object]) -> set[tuple[int, int]] | None:
    """Pairs of numbers in which facts differ; None where they differ otherwise."""
    if old.keys() != new.keys():
        return None
    pairs = set()
    for a, b in ((old[key], new[key]) for key in old):
        try:
            if isinstance(a, partial) and isinstance(b, partial):
                a, b = (a.func, a.args, a.keywords), (b.func, b.args, b.keywords)
            if a is b or (type(a) is type(b) and not isinstance(a, torch.Tensor) and a == b):
                continue
        except Exception:  # noqa: BLE001 - a class of the model may compare in any way
            return None
        if type(a) is not int or type(b) is not int:
            return None
        pairs.add((a, b))
    return pairs


def _indices(before: _Call, now: _Call) -> tuple[int, int] | None:
    """The indices in the cache of two layers that differ in nothing else; None for other layers."""
    pairs = _differences(before.facts, now.facts)
    if pairs is None or len(pairs) != 1 or before.cached != {old for old, _ in pairs}:
        return None
    return next(iter(pairs))


def _traced(tracer: Any, value: Any) -> _Traced:
    """A value and its node; None for a constant."""
    found = get_proxy_slot(value, tracer, None) if isinstance(value, torch.Tensor) else None
    return value, None if found is None else found.proxy.node


def _record(now: _Call, forward: Callable[[], Any], tracer: Any, plug: Emitter) -> None:
    """Trace a layer."""
    last, versions, masks = next(reversed(tracer.graph.nodes)), _versions(now.inputs), plug.mask_count
    states: dict[Any, Any] = {**plug.written, **plug.states}
    now.output = forward()
    while (last := last.next).op != "root":
        now.nodes.append(last)
    now.written = {k: each for k, each in (*plug.written.items(), *plug.states.items()) if states.get(k) is not each}
    now.last_state = plug.last_state
    results = tree_leaves(now.output)
    cached = [one for each in now.written.values() for one in (each.present if isinstance(each, Written) else (each,))]
    now.made = {id(each): _traced(tracer, each)[1] for each in (*results, *cached, now.last_state)}
    given, nodes = {id(each) for each, _ in now.inputs}, set(now.nodes)
    now.can_repeat = (
        (versions, masks, 1) == (_versions(now.inputs), plug.mask_count, len(now.cached))
        and all(isinstance(each, (torch.Tensor, *PLAIN)) or id(each) in given for each in results)
        and all(_can_copy(node, nodes) for node in now.nodes)
    )


def _versions(inputs: list[_Traced]) -> list[int]:
    """Versions of tensors, which count writes."""
    return [each._version for each, _ in inputs if isinstance(each, torch.Tensor)]


def _can_copy(node: Node, made: set[Node]) -> bool:
    """Whether a node contains no graph and no symbol of its own, and writes only into tensors of its layer."""
    schema = getattr(node.target, "_schema", None)
    writes_outside = schema is not None and schema.is_mutable and node.args[0] not in made
    return not (writes_outside or isinstance(node.target, HigherOrderOperator) or "unbacked_bindings" in node.meta)


def _size(node: Node) -> Any:
    """A size as text: torch reads one of equal value from any tensor."""
    value = node.meta.get("val")
    return str(value) if isinstance(value, torch.SymInt) else node


@dataclass(slots=True)
class _Pair:
    """Two layers that differ only in their index."""

    tracer: Any
    plug: Emitter
    before: _Call
    now: _Call
    tensors: dict[int, Any] = field(default_factory=dict)
    """Identity of a tensor of the first layer -> its counterpart."""
    nodes: dict[Node, Node] = field(default_factory=dict)
    """Likewise for nodes."""

    def match(self, past: Mapping[Key, _Traced]) -> bool:
        """Match the inputs and past states of both layers; whether each has one counterpart."""
        old, new = _indices(self.before, self.now) or (0, 0)
        states = [(past[key], past.get((key[0], new, key[2]), (None, None))) for key in past if key[1] == old]
        for (a, first), (b, second) in (*zip(self.before.inputs, self.now.inputs, strict=True), *states):
            if isinstance(a, torch.Tensor):
                if _form(a) != _form(b) or (None in (first, second) and a is not b):
                    return False
                if first is not None and second is not None and self.nodes.setdefault(first, second) is not second:
                    return False
                self.tensors[id(a)] = b
        return True

    def is_same(self) -> bool:
        """Whether both recorded the same nodes."""
        if len(self.before.nodes) != len(self.now.nodes):
            return False
        for old, new in zip(self.before.nodes, self.now.nodes, strict=True):
            is_same = old.target == new.target or (old.op == "get_attr" and self._is_constant(old, new))
            moved, own = (map_arg(each, _size) for each in (self._moved_inputs(old), (new.args, new.kwargs)))
            if old.op != new.op or not is_same or moved != own:
                return False
            self.nodes[old] = new
        return True

    def _is_constant(self, old: Node, new: Node) -> bool:
        """Whether both are constants of the code, of equal value."""
        a, b = (getattr(self.tracer.root, str(node.target)) for node in (old, new))
        with unset_fake_temporarily(), _disable_current_modes():
            return all(type(each) is torch.Tensor for each in (a, b)) and torch.equal(a, b)

    def _moved_inputs(self, node: Node) -> Any:
        """Arguments of a node of the first layer, for the second."""
        return map_arg((node.args, node.kwargs), lambda each: self.nodes.get(each, each))

    def copy(self) -> Any:
        """Copy the nodes of the first layer and what it cached; returns the output."""
        before, plug, graph = self.before, self.plug, self.tracer.graph
        for node in before.nodes:
            args, kwargs = self._moved_inputs(node)
            made = graph.create_node(node.op, node.target, args, kwargs, node.name, node.type)
            made.meta = {**node.meta, STACK: self._moved_stack(node.meta.get(STACK, {}))}
            self.nodes[node] = made
        _, index = _indices(before, self.now) or (0, 0)
        for key, each in before.written.items():
            if isinstance(each, Written):  # the model cannot read its other tensors again
                plug.written[index] = replace(each, present=tuple(self._moved(one) for one in each.present))
            else:
                plug.states[key[0], index, key[2]] = self._moved(each)
        plug.last_state = self._moved(before.last_state)
        leaves, tree = tree_flatten(before.output)
        return tree_unflatten([self._moved(each) for each in leaves], tree)

    def _moved_stack(self, stack: dict[str, tuple[str, str]]) -> dict[str, tuple[str, str]]:
        """The modules around a node of the first layer, in the second."""
        old, new = self.before.path, self.now.path
        inside = [key for key, (path, _) in stack.items() if f"{path}.".startswith(f"{old}.")]
        moved = {key.replace(old, new, 1): (stack[key][0].replace(old, new, 1), stack[key][1]) for key in inside}
        return {key: each for key, each in stack.items() if key not in inside} | moved

    def _moved(self, value: Any) -> Any:
        """The counterpart of a tensor of the first layer; other values are those of both."""
        node = self.before.made.get(id(value))
        if id(value) not in self.tensors and node in self.nodes:
            with disable_proxy_modes_tracing(), DisableTorchFunction():
                made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
            track_tensor_tree(made, Proxy(self.nodes[node], self.tracer), constant=None, tracer=self.tracer)
            self.tensors[id(value)] = made
        return self.tensors.get(id(value), value)
