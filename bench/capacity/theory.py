"""Waiting times of queues that have a formula, to hold the simulation to, and to plan with.

All times are in one unit, rates are one over it. `servers` is k, `load` is rho: the arrivals' rate
times the mean service, by k.
"""

from math import exp, log


def erlang_c(servers: int, load: float) -> float:
    """Return the probability that a customer of M/M/k waits (Erlang's C formula), for load < 1.

    It is found from Erlang's B, one server after another: B(0) = 1, B(k) = aB / (k + aB), where a
    is the traffic k * load.
    """
    traffic, blocked = servers * load, 1.0
    for k in range(1, servers + 1):
        blocked = traffic * blocked / (k + traffic * blocked)
    return blocked / (1 - load * (1 - blocked))


def wait_mmk(servers: int, load: float, service: float) -> float:
    """Return the mean waiting time of M/M/k: C(k, rho) * service / (k * (1 - rho))."""
    return erlang_c(servers, load) * service / (servers * (1 - load))


def wait_mg1(load: float, service: float, service_cv2: float) -> float:
    """Return the mean waiting time of M/G/1, by Pollaczek and Khinchine; M/D/1 has cv2 = 0."""
    return load * service * (1 + service_cv2) / (2 * (1 - load))


def wait_gk(
    servers: int, load: float, service: float, arrival_cv2: float, service_cv2: float
) -> float:
    """Return about the mean waiting time of G/G/k, by Allen and Cunneen: that of M/M/k, times the
    mean of the two squared coefficients of variation. It is exact for M/M/k and for M/G/1.
    """
    return (arrival_cv2 + service_cv2) / 2 * wait_mmk(servers, load, service)


def wait_percentile(servers: int, load: float, mean_wait: float, share: float) -> float:
    """Return below which time the waits of a share of all customers lie, where those who wait at
    all wait for an exponential time, as in M/M/k.
    """
    waits = erlang_c(servers, load)
    return 0.0 if waits <= 1 - share else mean_wait / waits * log(waits / (1 - share))


def step_in_batches(fixed: float, per_token: float, tokens_per_s: float) -> float:
    """Return the mean length of a step that takes all that has come, where there always is some:
    it is as long as what came during the one before asks for, S = fixed + per_token * rate * S.
    """
    return fixed / (1 - per_token * tokens_per_s)


def availability(servers: int, needed: int, up: float) -> float:
    """Return how probable it is that `needed` of so many servers are up, each with the probability
    `up` and independently of the others.
    """
    chance, total = _choose(servers, needed, up), 0.0
    for k in range(needed, servers + 1):
        total += chance
        chance *= (servers - k) / (k + 1) * up / (1 - up) if up < 1 else 0.0
    return min(1.0, total) if up < 1 else 1.0


def _choose(servers: int, up: int, chance: float) -> float:
    """Return how probable it is that exactly so many are up."""
    if chance >= 1:
        return float(up == servers)
    found = up * log(chance) + (servers - up) * log(1 - chance)
    for k in range(1, up + 1):
        found += log(servers - up + k) - log(k)
    return exp(found)
