"""Processes that are forked while signals request a save."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time

import pytest

from shardckpt.checkpoint.notice import watch_signals
from shardckpt.checkpoint.run.save_schedule import SaveSchedule

_LIMIT_S = 20


@contextlib.contextmanager
def handled(number, handler):
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def exit_of_forked(*numbers, after=lambda: 0):
    """Return the exit status of a fork that sends itself signals: negative if one ended it."""
    if not (child := os.fork()):
        try:
            for number in numbers:
                os.kill(os.getpid(), number)
            status = after()
        except BaseException:  # noqa: BLE001  (the fork ends here)
            status = 99
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def wait():
    while True:
        time.sleep(0.05)


class TestAFork:
    def test_sigterm_ends_it_and_is_still_only_noted_in_the_training(self):
        schedule = SaveSchedule(None)
        with handled(signal.SIGTERM, signal.SIG_DFL):
            with schedule.watch((signal.SIGTERM,)):
                assert exit_of_forked(signal.SIGTERM) == -signal.SIGTERM
                assert not schedule.has_signal
                signal.raise_signal(signal.SIGTERM)
                assert schedule.has_signal
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    def test_sigterm_ends_it_also_before_its_handlers_are_restored(self, monkeypatch):
        parent, restore = os.getpid(), watch_signals._restore_handlers

        def end_first(before):
            if os.getpid() != parent:
                os.kill(os.getpid(), signal.SIGTERM)
            restore(before)

        monkeypatch.setattr(watch_signals, "_restore_handlers", end_first)
        with handled(signal.SIGTERM, signal.SIG_DFL), SaveSchedule(None).watch((signal.SIGTERM,)):
            assert exit_of_forked() == -signal.SIGTERM
        assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())

    def test_it_has_the_handler_from_before_all_blocks(self):
        heard = []
        blocks = [SaveSchedule(None).watch((signal.SIGTERM,)) for _ in range(2)]
        with handled(signal.SIGTERM, lambda *_: heard.append(1)), blocks[0], blocks[1]:
            assert exit_of_forked(signal.SIGTERM, after=lambda: len(heard)) == 1

    def test_it_keeps_a_handler_of_its_own_when_it_leaves_the_block(self):
        stack = contextlib.ExitStack()

        def leave():
            signal.signal(signal.SIGTERM, own := lambda *_: None)
            stack.close()
            return int(signal.getsignal(signal.SIGTERM) is own)

        with stack:
            stack.enter_context(SaveSchedule(None).watch((signal.SIGTERM,)))
            assert exit_of_forked(after=leave) == 1

    def test_another_signal_that_would_end_it_is_ignored_as_schedulers_send_it_to_all(self):
        with handled(signal.SIGUSR1, signal.SIG_DFL), SaveSchedule(None).watch((signal.SIGUSR1,)):
            assert exit_of_forked(signal.SIGUSR1) == 0

    def test_one_that_begins_after_the_block_has_what_is_handled_then(self):
        with handled(signal.SIGTERM, signal.SIG_DFL):
            with SaveSchedule(None).watch((signal.SIGTERM,)):
                pass
            with handled(signal.SIGTERM, signal.SIG_IGN):
                assert exit_of_forked(signal.SIGTERM) == 0

    @pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
    def test_a_thread_can_fork_it(self):
        exits = []
        with handled(signal.SIGTERM, signal.SIG_DFL), SaveSchedule(None).watch((signal.SIGTERM,)):
            thread = threading.Thread(target=lambda: exits.append(exit_of_forked(signal.SIGTERM)))
            thread.start()
            thread.join()
        assert exits == [-signal.SIGTERM]


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
class TestMultiprocessing:
    def test_a_daemon_and_a_pool_end_as_without_the_block(self):
        context = multiprocessing.get_context("fork")
        with handled(signal.SIGTERM, signal.SIG_DFL), SaveSchedule(None).watch((signal.SIGTERM,)):
            pool, daemon = context.Pool(2), context.Process(target=wait, daemon=True)
            daemon.start()
            assert pool.map(abs, [-1, -2]) == [1, 2]
            pool.apply_async(wait)
        ends = threading.Thread(target=lambda: (daemon.terminate(), daemon.join(), pool.terminate(), pool.join()))
        ends.daemon = True
        ends.start()
        ends.join(_LIMIT_S)
        is_hanging = ends.is_alive()
        if is_hanging:
            for process in (daemon, *pool._pool):
                process.kill()
        assert not is_hanging
