"""Finds expressions in an ONNX graph and puts others in their place.

A pattern is the expression as one would write it, in nested tuples:

    ("Add", ("MatMul", "x", "kernel"), "bias")

A string stands for any value, the same one wherever it occurs; a number or a list for a constant of this content; a
tuple for the result of an operator, with its attributes in a dict at the end where they matter; `OneOf` for several
forms of one thing; `Named` for an expression whose value is wanted too. The operands of Add and Mul may stand in either
order.
"""

import collections
import collections.abc
import dataclasses
import graphlib
import itertools

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper

_COMMUTATIVE = {"Add", "Mul"}


class OneOf:
    """Any of several patterns; the first that fits."""

    def __init__(self, *patterns):
        self.patterns = patterns


class Named:
    """A pattern whose own value gets a name in the match."""

    def __init__(self, name, pattern):
        self.name = name
        self.pattern = pattern


@dataclasses.dataclass(frozen=True)
class Rule:
    """What is looked for, and what takes its place.

    Attributes:
        pattern: a pattern, as above.
        replace: called with the graph and the match (string of the pattern -> name of the value). Builds new nodes with
            `graph.add` and returns the name of the value that replaces the one found, or None to leave it as it is.
    """

    pattern: tuple
    replace: collections.abc.Callable


def _in_running_order(nodes):
    producers = {output: i for i, node in enumerate(nodes) for output in node.output}
    needs = {i: [producers[name] for name in node.input if name in producers] for i, node in enumerate(nodes)}
    return [nodes[i] for i in graphlib.TopologicalSorter(needs).static_order()]


class Graph:
    """A graph that is being rewritten: its nodes in an order in which they can run, its constants by name."""

    def __init__(self, proto):
        """Takes an `onnx.GraphProto` without subgraphs; `write` puts the result back."""
        self._proto = proto
        self.nodes = _in_running_order(proto.node)
        self.constants = {i.name: onnx.numpy_helper.to_array(i) for i in proto.initializer}
        self.outputs = [o.name for o in proto.output]
        self._names = itertools.count()
        self._added = []
        self._index()

    def _index(self):
        self._producers = {output: node for node in self.nodes for output in node.output}

    def add(self, op_type, *inputs, outputs=1, domain="", **attributes):
        """Adds a node in front of the one being replaced.

        Args:
            op_type: the operator.
            *inputs: names of values, "" for one left out, or arrays, which become constants.
            outputs: how many it has.
            domain: of the operator; "" is the standard.
            **attributes: of the node.

        Returns:
            The name of its output; a list of names when there are several.
        """
        names = [i if isinstance(i, str) else self._constant(i) for i in inputs]
        results = [f"new/{next(self._names)}" for _ in range(outputs)]
        self._added.append(onnx.helper.make_node(op_type, names, results, domain=domain, **attributes))
        return results[0] if outputs == 1 else results

    def _constant(self, array):
        name = f"new/{next(self._names)}"
        self.constants[name] = np.asarray(array)
        return name

    def match(self, value, pattern):
        """Returns string of the pattern -> name of the value, or None when `value` isn't computed like that."""
        return next(self._matches(value, pattern, {}), None)

    def _matches(self, value, pattern, found):
        if isinstance(pattern, str):
            if found.get(pattern, value) == value:
                yield {**found, pattern: value}
        elif isinstance(pattern, OneOf):
            for one in pattern.patterns:
                yield from self._matches(value, one, found)
        elif isinstance(pattern, Named):
            for match in self._matches(value, pattern.name, found):
                yield from self._matches(value, pattern.pattern, match)
        elif isinstance(pattern, tuple):
            yield from self._node_matches(self._producers.get(value), pattern, found)
        else:
            constant = self.constants.get(value)
            if constant is not None and constant.size == np.size(pattern) and np.allclose(constant, pattern, 1e-6, 0):
                yield found

    def _node_matches(self, node, pattern, found):
        op_type, *inputs = pattern
        attributes = inputs.pop() if isinstance(inputs[-1], dict) else {}
        if node is None or node.op_type != op_type or len(node.input) != len(inputs):
            return
        own = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        if any(own.get(name) != value for name, value in attributes.items()):
            return
        for operands in itertools.permutations(node.input) if op_type in _COMMUTATIVE else (node.input,):
            matches = [found]
            for operand, wanted in zip(operands, inputs, strict=True):
                matches = [m for match in matches for m in self._matches(operand, wanted, match)]
            yield from matches

    def rewrite(self, *rules):
        """Applies each rule wherever it fits, one rule after the other, and removes what nothing uses any more."""
        for rule in rules:
            replaced, nodes = {}, []
            for node in self.nodes:
                node.input[:] = [replaced.get(name, name) for name in node.input]
                match = self.match(node.output[0], rule.pattern)
                result = rule.replace(self, match) if match else None
                nodes += self._added
                for new in self._added:
                    self._producers |= dict.fromkeys(new.output, new)
                self._added = []
                nodes.append(node)
                if result is not None and node.output[0] in self.outputs:
                    replaced |= {old: node.output[0] for old, new in replaced.items() if new == result}
                    replaced[result] = node.output[0]
                    self._move_output(nodes, node, result)
                elif result is not None:
                    replaced[node.output[0]] = result
            self.nodes = nodes
            self._remove_unused()
            self._index()

    def _move_output(self, nodes, node, result):
        """Gives the graph's output, which `node` made until now, to the node that makes `result`."""
        name = node.output[0]
        node.output[0] = f"{name}/old"
        for other in nodes:
            for names in (other.input, other.output):
                names[:] = [name if n == result else n for n in names]
        self._producers[name] = self._producers.pop(result)

    def _remove_unused(self):
        used, kept = set(self.outputs), []
        for node in reversed(self.nodes):
            if used.intersection(node.output):
                kept.append(node)
                used.update(node.input)
        self.nodes = kept[::-1]
        self.constants = {name: array for name, array in self.constants.items() if name in used}

    def write(self):
        """Puts nodes and constants back, under names and in an order that follow from the graph's structure alone.

        The names that tf2onnx gives count up from one conversion to the next, and its order is that of hash values.
        Equal constants and nodes are written once.
        """
        names = {name: name for name in ["", *(i.name for i in self._proto.input)]}
        contents, counts = {}, collections.Counter()
        del self._proto.node[:], self._proto.initializer[:]
        stack = self.outputs[::-1]
        while stack:  # depth first; not by recursion, which a deep model would exhaust
            value = stack[-1]
            node = self._producers.get(value)
            missing = [name for name in node.input if name not in names] if node and value not in names else []
            stack += missing[::-1]
            if missing:
                continue
            stack.pop()
            if value in names:
                continue
            if node is None:
                names[value] = self._write_constant(self.constants[value], contents)
            else:
                name = f"{node.op_type}_{counts[node.op_type]}"
                counts[node.op_type] += self._write_node(node, names, contents, name)

    def _write_constant(self, array, contents):
        content = array.dtype.str, array.shape, array.tobytes()
        if content not in contents:
            contents[content] = f"constant_{len(self._proto.initializer)}"
            self._proto.initializer.append(onnx.numpy_helper.from_array(array, contents[content]))
        return contents[content]

    def _write_node(self, node, names, contents, name):
        """Writes a node, unless one with these inputs is there already; returns whether it did."""
        attributes = sorted(node.attribute, key=lambda a: a.name)
        inputs = [names[i] for i in node.input]
        content = node.domain, node.op_type, *inputs, *(a.SerializeToString() for a in attributes)
        if content in contents and not set(node.output) & set(self.outputs):
            names.update(zip(node.output, contents[content], strict=True))
            return False
        for i, output in enumerate(node.output):
            own = name if len(node.output) == 1 else f"{name}/{i}"
            names[output] = output if output in self.outputs else own
        new = self._proto.node.add(op_type=node.op_type, domain=node.domain, name=name, input=inputs)
        new.output.extend(names[o] for o in node.output)
        new.attribute.extend(attributes)
        contents[content] = list(new.output)
        return True
