"""A forked engine process: it holds nothing of its server's network."""

from __future__ import annotations

import multiprocessing
import socket
from contextlib import nullcontext
from multiprocessing.connection import Connection

import psutil
import pytest

from agent_r1.rollout.vllm.engine_process import forked_processes, leave_connections
from agent_r1.rollout.vllm.settings import VllmSettings
from agent_r1.runtime.config import ListenConfig, ModelConfig
from agent_r1.runtime.http.serving import bind

WAIT_S = 20.0


def report(pipe: Connection, kept: socket.socket) -> None:
    before = len(psutil.Process().net_connections("inet"))
    leave_connections()
    kept.send(b"x")
    pipe.send((before, len(psutil.Process().net_connections("inet"))))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_forked_process_leaves_the_network_and_keeps_the_rest(host: str):
    listener = bind("test", ListenConfig(host=host), None)
    listener.listen()
    ours, theirs = socket.socketpair()
    with listener, socket.create_connection(listener.getsockname()[:2]), ours, theirs:
        receiving, sending = multiprocessing.Pipe(duplex=False)
        context = multiprocessing.get_context("fork")
        process = context.Process(target=report, args=(sending, theirs))
        process.start()
        assert receiving.poll(WAIT_S)
        before, after = receiving.recv()
        ours.settimeout(WAIT_S)
        assert ours.recv(1) == b"x"  # a socket of this machine alone
        process.join(WAIT_S)
    assert (before >= 2, after) == (True, 0)


def count_connections(pipe: Connection) -> None:
    pipe.send(len(psutil.Process().net_connections("inet")))


def test_a_process_forked_after_the_engine_keeps_the_network():
    receiving, sending = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("fork")
    settings = VllmSettings(ModelConfig(path="unused/model"))
    with bind("test", ListenConfig(), None) as listener:
        listener.listen()
        counts = []
        for inside in (True, False):
            with forked_processes(settings) if inside else nullcontext():
                process = context.Process(target=count_connections, args=(sending,))
                process.start()
                assert receiving.poll(WAIT_S)
                counts.append(receiving.recv())
                process.join(WAIT_S)
    assert counts[0] == 0
    assert counts[1] >= 1
