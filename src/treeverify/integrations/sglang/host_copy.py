"""Copies of a small device tensor on the host: started without waiting, read when they have arrived."""

from __future__ import annotations

import torch


class HostCopy:
    """The newest complete copy of ``source``, which stays on its device and goes on changing.

    On a GPU the copy runs on the stream that is current at ``start``, into pinned memory, so it sees what that stream
    did before and the host waits for nothing.
    """

    def __init__(self, source: torch.Tensor) -> None:
        self._source = source
        self._cuda = source.device.type == "cuda"
        self._arriving = torch.zeros(source.shape, dtype=source.dtype, pin_memory=self._cuda)
        self._arrived = self._arriving.clone()
        self._event: torch.cuda.Event | None = None

    def start(self) -> None:
        """Start a copy, unless one is under way."""
        if self._settle():
            self._arriving.copy_(self._source, non_blocking=True)
            if self._cuda:
                self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._event.record()
            else:
                self._arrived.copy_(self._arriving)

    def latest(self) -> torch.Tensor:
        """Return the newest copy that is complete: zeros before the first. Waits for nothing."""
        self._settle()
        return self._arrived

    def now(self) -> torch.Tensor:
        """Return a copy of what every stream has done up to now. Waits for the device."""
        if self._cuda:
            torch.cuda.synchronize(self._source.device)
            self._settle()
        self._arrived.copy_(self._source)
        return self._arrived

    def _settle(self) -> bool:
        """Take over a copy that has arrived; False while one is under way."""
        if self._event is not None:
            if not self._event.query():  # type: ignore[no-untyped-call]
                return False
            self._arrived.copy_(self._arriving)
            self._event = None
        return True
