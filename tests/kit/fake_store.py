"""TransferQueue's key-value calls in memory. As there, a field comes back only where every row that is asked for has it, and
a field has one dtype in all rows."""

from __future__ import annotations

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta


class FakeStore:
    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], dict] = {}
        self.tags: dict[tuple[str, str], dict] = {}
        self.dtypes: dict[tuple[str, str], torch.dtype] = {}
        self.calls: list[tuple[str, str]] = []
        """(read or written, field), in order."""

    def install(self, monkeypatch) -> FakeStore:
        """In place of the module's functions, in this process."""
        import transfer_queue

        for name in ("kv_batch_put", "kv_batch_get", "kv_clear", "kv_list"):
            monkeypatch.setattr(transfer_queue, name, getattr(self, name))
        return self

    def kv_batch_put(self, keys, partition_id, fields=None, tags=None, data_parser=None) -> KVBatchMeta:
        if fields is None and tags is None:
            raise ValueError("neither fields nor tags")
        places = [(partition_id, key) for key in keys]
        for name in fields.keys() if fields is not None else ():
            self.calls.append(("written", name))
            if isinstance(column := fields.get(name), torch.Tensor):
                assert self.dtypes.setdefault((partition_id, name), column.dtype) == column.dtype, name
        for number, place in enumerate(places):
            row = self.rows.setdefault(place, {})
            for name in fields.keys() if fields is not None else ():
                column = fields.get(name)
                row[name] = (
                    column.unbind()[number].clone()
                    if isinstance(column, torch.Tensor)
                    else _plain(column[number])
                )
            if tags is not None:
                self.tags.setdefault(place, {}).update(tags[number])
        known = sorted(set.union(*(set(self.rows[place]) for place in places)))
        return KVBatchMeta(
            keys=list(keys),
            tags=[dict(self.tags.get(place, {})) for place in places],
            partition_id=partition_id,
            fields=known,
        )

    def kv_batch_get(self, keys, partition_id, select_fields=None) -> TensorDict:
        rows = [self.rows[partition_id, key] for key in keys]
        found = {}
        for name in select_fields or list(rows[0]):
            if not all(name in row for row in rows):
                continue
            self.calls.append(("read", name))
            values = [row[name] for row in rows]
            if isinstance(values[0], torch.Tensor):
                found[name] = torch.nested.as_nested_tensor(values, layout=torch.jagged)
            else:
                found[name] = NonTensorStack(*(NonTensorData(value) for value in values))
        return TensorDict(found, batch_size=len(keys))

    def kv_clear(self, keys, partition_id) -> None:
        for key in keys:
            self.rows.pop((partition_id, key), None)
            self.tags.pop((partition_id, key), None)
        for partition, name in list(self.dtypes):
            if not any(of == partition and name in row for (of, _), row in self.rows.items()):
                del self.dtypes[partition, name]

    def kv_list(self, partition_id) -> dict[str, dict[str, dict]]:
        found = {key: dict(tag) for (partition, key), tag in self.tags.items() if partition == partition_id}
        return {partition_id: found} if found else {}


def _plain(value):
    return getattr(value, "data", value)
