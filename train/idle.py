"""How long a GPU had nothing to do because its next batch was not there.

The host's own waiting does not tell: it runs ahead of the GPU, and where reading is just fast enough it waits all the
time while the GPU never does. So events tell when the GPU was through with its work, and when the batch after it had
come. Knows events only.
"""

from __future__ import annotations

import torch


class Idle:
    """Counts what lies between the end of one batch's work and the arrival of the next batch, on the current stream."""

    def __init__(self) -> None:
        self._since: torch.cuda.Event | None = None
        self._between: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._counted = 0.0

    def begin(self) -> None:
        """From here on, once the work asked for so far is done, there is only the next batch to wait for."""
        self._since = torch.cuda.Event(enable_timing=True)
        self._since.record()

    def end(self, arrival: torch.cuda.Event) -> None:
        """A batch is there with this event, which takes the time too."""
        if self._since is not None:
            self._between.append((self._since, arrival))
        self._since = None

    def seconds(self) -> float:
        """Waited for so far, of batches that have come."""
        while self._between and all(event.query() for event in self._between[0]):
            since, arrival = self._between.pop(0)
            self._counted += max(0.0, since.elapsed_time(arrival)) / 1000  # it may have come before
        return self._counted
