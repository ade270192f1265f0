import errno
import socket
import sys

import pytest

from shoal.bench import probes
from shoal.bench.findings import run_checks


def test_the_clock_and_ports_of_this_machine_are_fine():
    findings = run_checks({"ports": probes.check_ports, "clock": probes.check_clock})
    assert [finding.status for finding in findings] == ["ok", "ok"]


def test_ports_that_cannot_be_bound_or_reached_are_failures(monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    with monkeypatch.context() as patched:
        patched.setattr(socket, "create_connection", refuse)
        finding = probes.check_ports()
        assert finding.status == "fail"
        assert "cannot be reached" in finding.says
    monkeypatch.setattr(socket, "create_server", refuse)
    finding = probes.check_ports()
    assert finding.status == "fail"
    assert "firewall" in finding.next_step


def test_a_number_that_udp_cannot_have_is_tried_again(monkeypatch):
    class Busy(socket.socket):
        num_refusals = 2

        def bind(self, address):
            if self.type == socket.SOCK_DGRAM and Busy.num_refusals:
                Busy.num_refusals -= 1
                raise OSError(errno.EADDRINUSE, "Address already in use")
            super().bind(address)

    monkeypatch.setattr(socket, "socket", Busy)
    assert probes.check_ports().status == "ok"
    assert Busy.num_refusals == 0
    Busy.num_refusals = 1000
    assert "Address already in use" in probes.check_ports().says


def test_loopback_moves_bytes_and_a_slow_one_is_a_warning(monkeypatch):
    finding = probes.check_loopback(seconds=0.02)
    assert finding.figures["gb_per_s"] > 0.01
    monkeypatch.setattr(probes, "SLOW_LOOPBACK_GB_S", 1e6)
    assert probes.check_loopback(seconds=0.01).status == "warn"


def test_timers_are_measured_and_late_ones_are_a_warning(monkeypatch):
    finding = probes.check_timers(num_sleeps=5, sleep_s=0.001)
    assert finding.figures["p50_s"] <= finding.figures["p95_s"]
    monkeypatch.setattr(probes, "LATE_TIMER_S", -1)
    assert probes.check_timers(num_sleeps=2, sleep_s=0.001).status == "warn"


def test_the_switch_interval_is_as_before_after_it_was_measured(monkeypatch):
    before = sys.getswitchinterval()
    finding = probes.check_switching(num_echoes=3)
    assert sys.getswitchinterval() == before
    assert finding.figures["interval_s"] == before
    monkeypatch.setattr(probes, "LATE_SWITCH_S", -1)
    assert probes.check_switching(num_echoes=2).status == "warn"


@pytest.mark.parametrize(("wall_s", "status"), [(0.0, "fail"), (1.8e9, "ok"), (5e9, "fail")])
def test_a_calendar_of_another_age_is_a_failure(monkeypatch, wall_s, status):
    class Wrong:
        now_s = staticmethod(probes.SYSTEM_CLOCK.now_s)

        def wall_s(self):
            return wall_s

    monkeypatch.setattr(probes, "SYSTEM_CLOCK", Wrong())
    assert probes.check_clock().status == status


def test_a_coarse_clock_is_a_warning(monkeypatch):
    monkeypatch.setattr(probes, "_tick_s", lambda: 0.0156)
    assert probes.check_clock().status == "warn"
