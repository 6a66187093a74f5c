"""Masks what is about to leave in rolled files: the columns that hold what others wrote.

Each string column of a recording is either ours (ids, names out of a fixed list) or in FREE_TEXT;
a test refuses one that is neither.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from dsagent.agent.masking import mask
from dsagent.agent.sinks.schema import Table

if TYPE_CHECKING:
    import pyarrow as pa

# By table: columns, and fields of lists of structures as column.field. Of a map the values.
FREE_TEXT: Mapping[str, tuple[str, ...]] = {
    # The client chooses its X-Request-Id and X-Tenant-Id, and an engine may take its own id from
    # there; it asks for whatever model it likes.
    "requests": (
        *("request_id", "external_id", "tenant", "model", "operation", "finish_reason", "error"),
        "delayed_by.request_id",
    ),
    "parts": ("request_id", "evidence.fact", "culprits.name", "culprits.request_id"),
    "opens": ("request_id",),
    "kernel": ("thread", "culprit", "culprit_thread"),
    "samples": ("attributes",),
    "statuses": ("name", "reason", "attributes"),
}


def masked(table: pa.Table, of: Table) -> pa.Table:
    """The same with what looks like personal data or a secret replaced."""
    import pyarrow as pa

    fields: dict[str, list[str]] = {}
    for path in FREE_TEXT.get(of.name, ()):
        column, _, field = path.partition(".")
        fields.setdefault(column, []).append(field)
    for column, inner in fields.items():
        position = table.schema.get_field_index(column)
        arrays = [_masked(chunk, inner) for chunk in table.column(position).chunks]
        whole = pa.chunked_array(arrays, table.schema.field(position).type)
        table = table.set_column(position, table.schema.field(position), whole)
    return table


def _masked(array: pa.Array, inner: list[str]) -> pa.Array:
    import pyarrow as pa

    if pa.types.is_string(array.type):
        return _strings(array)
    array = _from_zero(array)
    if pa.types.is_map(array.type):
        return pa.MapArray.from_arrays(
            array.offsets, array.keys, _strings(array.items), mask=_nulls(array)
        )
    structs = array.values
    columns = [
        _strings(child) if name in inner else child
        for name, child in zip(
            structs.type.names, (structs.field(i) for i in range(structs.type.num_fields)),
            strict=True,
        )
    ]  # fmt: skip
    rebuilt = pa.StructArray.from_arrays(columns, fields=list(structs.type))
    return pa.ListArray.from_arrays(array.offsets, rebuilt, type=array.type, mask=_nulls(array))


def _from_zero(array: pa.Array) -> pa.Array:
    """A copy whose offsets begin at its own values: a slice shares those of the whole."""
    import pyarrow as pa

    return (
        pa.concat_arrays([array]) if array.offset == 0 else array.take(pa.array(range(len(array))))
    )


def _nulls(array: pa.Array) -> pa.Array | None:
    return array.is_null() if array.null_count else None


def _strings(array: pa.Array, change: Callable[[str], str] = mask) -> pa.Array:
    """Each different text is looked at once."""
    import pyarrow as pa

    codes = array.dictionary_encode()
    texts = codes.dictionary.to_pylist()
    changed = [None if text is None else change(text) for text in texts]
    if changed == texts:
        return array
    return pa.array(changed, pa.string()).take(codes.indices)
