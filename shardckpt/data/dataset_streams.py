"""Streams from an iterable data set of Hugging Face's `datasets`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardckpt.errors import UsageError


class DatasetStreams:
    """Streams from a `datasets.IterableDataset`, for `ElasticStreamLoader(DatasetStreams(dataset, 48), 48, ...)`.

    Each stream has `num_shards / streams` shards. Every loader worker can read any of them, which the data set itself
    does not allow. `set_epoch` is called for each epoch, so that shuffles differ.

    With `resume_by="state"`, the data set's `state_dict` finds a place without reading. It lacks the shuffle buffer, so
    samples in the buffer would be lost. With `shuffle(buffer_size=...)` use `resume_by="reading"`, the default.

    Args:
        dataset: Data set with `num_shards` and `shard`.
        streams: Number of streams.

    Raises:
        UsageError: The data set has too few shards.
    """

    def __init__(self, dataset: Any, streams: int) -> None:
        if dataset.num_shards < streams:
            raise UsageError(
                f"{streams} streams need as many shards, and the data set has {dataset.num_shards}",
                fix="Use fewer streams, or `to_iterable_dataset(num_shards=...)`.",
            )
        self._dataset, self._streams = dataset, streams

    def __call__(self, stream: int, epoch: int) -> DatasetExamples:
        """Open a stream.

        Args:
            stream: Number of the stream.
            epoch: Number of the epoch.
        """
        part = self._dataset.shard(num_shards=self._streams, index=stream)
        part.set_epoch(epoch)
        return DatasetExamples(part)


class DatasetExamples:
    """Examples from a data set, whose own iterator would divide them over the loader's workers again."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the examples."""
        for batch in self._dataset.iter(batch_size=1):
            yield {name: values[0] for name, values in batch.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last example."""
        state: dict[str, Any] = self._dataset.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start the next iteration at a state."""
        self._dataset.load_state_dict(state)
