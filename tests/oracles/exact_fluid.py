"""A slow fluid simulator in exact fractions, written from the definitions, to compare with."""

from fractions import Fraction

from fivefold.network.simulation import Compute


def exact_rates(flows, capacities):
    """Max-min fair rates: fill water class by class, stopping who is on a full link."""
    left = [Fraction(capacity) for capacity in capacities]
    rates = [None] * len(flows)
    for priority in sorted({flow["priority"] for flow in flows}):
        own = [number for number, flow in enumerate(flows) if flow["priority"] == priority]
        own = [number for number in own if flows[number]["route"] or flows[number]["cap"]]
        for number, rate in _fill(own, flows, left).items():
            rates[number] = rate
        for number in own:
            for link in flows[number]["route"]:
                if rates[number] is not None:
                    left[link] -= rates[number]
    return rates


def _fill(own, flows, left):
    units = {}
    for number in own:
        group = flows[number]["group"]
        units.setdefault(("alone", number) if group is None else ("group", group), []).append(
            number
        )
    levels = {}
    while len(levels) < len(units):
        found = []  # (level, units that stop there)
        for link, capacity in enumerate(left):
            load = {unit: _load(units[unit], flows, link) for unit in units}
            rest = sum(load[unit] for unit in units if unit not in levels)
            if rest:
                used = sum(load[unit] * levels[unit] for unit in levels)
                stops = [unit for unit in units if unit not in levels and load[unit]]
                found.append(((capacity - used) / rest, stops))
        for unit, numbers in units.items():
            caps = [flows[n]["cap"] / flows[n]["weight"] for n in numbers if flows[n]["cap"]]
            if unit not in levels and caps:
                found.append((min(caps), [unit]))
        if not found:
            break  # nothing limits the rest
        level, stops = min(found, key=lambda pair: pair[0])
        levels.update(dict.fromkeys(stops, level))
    return {
        number: levels[unit] * flows[number]["weight"] for unit in levels for number in units[unit]
    }


def _load(numbers, flows, link):
    return sum(flows[n]["weight"] * flows[n]["route"].count(link) for n in numbers)


def exact_times(tasks, capacities, latencies):
    """Start, last byte sent, and finish of every task, by id."""
    world = {_name(task): _state(task, latencies) for task in tasks}
    now = Fraction(0)
    while any(state["finish"] is None for state in world.values()):
        _start_all(world, now)
        if all(state["finish"] is not None for state in world.values()):
            break
        rates = _rates_now(world, capacities)
        step = _next_time(world, rates, now)
        for name, rate in rates.items():
            world[name]["left"] -= (step - now) * rate
        now = step
        for state in world.values():
            running = state["flow"] and state["start"] is not None and state["sent"] is None
            if running and state["left"] == 0:
                state["sent"] = now
            due = None if state["sent"] is None else state["sent"] + state["latency"]
            if state["finish"] is None and due is not None and due <= now:
                state["finish"] = due
    return {name: (s["start"], s["sent"], s["finish"]) for name, s in world.items()}


def _name(task):
    return task.task_id if isinstance(task, Compute) else task.flow_id


def _state(task, latencies):
    is_flow = not isinstance(task, Compute)
    state = {
        "flow": is_flow,
        "needs": list(task.depends_on),
        "release": Fraction(task.release_s),
        "priority": task.priority,
        "start": None,
        "sent": None,
        "finish": None,
        "ready": None,
        "latency": Fraction(0),
        "processor": None if is_flow else task.processor,
        "duration": None if is_flow else Fraction(task.duration_s),
    }
    if is_flow:
        cap = task.rate_cap_bytes_per_s
        state |= {
            "left": Fraction(task.size_bytes),
            "route": list(task.route),
            "group": task.group,
            "weight": Fraction(task.weight),
            "cap": None if cap is None else Fraction(cap),
            "latency": sum((Fraction(latencies[link]) for link in task.route), Fraction(0)),
        }
    return state


def _start_all(world, now):
    while _start_free(world, now) or _start_on_processors(world, now):
        pass


def _start_free(world, now):
    """Start what needs no processor; empty flows end at once and let others start."""
    before = [(s["ready"], s["start"], s["finish"]) for s in world.values()]
    for state in world.values():
        if state["ready"] is None and state["release"] <= now:
            ends = [world[name]["finish"] for name in state["needs"]]
            if all(end is not None and end <= now for end in ends):
                state["ready"] = now
        if state["start"] is None and state["ready"] is not None and state["processor"] is None:
            state["start"] = now
            if not state["flow"]:
                state["sent"] = now + state["duration"]
            elif state["left"] == 0 or not (state["route"] or state["cap"]):
                state["left"] = Fraction(0)
                state["sent"] = now
        due = None if state["sent"] is None else state["sent"] + state["latency"]
        if state["finish"] is None and due is not None and due <= now:
            state["finish"] = due
    return before != [(s["ready"], s["start"], s["finish"]) for s in world.values()]


def _start_on_processors(world, now):
    started = False
    for state in world.values():
        ready = state["start"] is None and state["ready"] is not None
        if ready and state["processor"] is not None and _may_run(state, world):
            state["start"] = now
            state["sent"] = now + state["duration"]
            started = True
    return started


def _may_run(state, world):
    busy = [s for s in world.values() if s["processor"] == state["processor"]]
    if any(s["start"] is not None and s["finish"] is None for s in busy):
        return False
    first = [s for s in busy if s["start"] is None and s["ready"] is not None]
    return state is min(first, key=lambda s: (s["priority"], s["ready"]))


def _running(world):
    return [
        name
        for name, state in world.items()
        if state["flow"] and state["start"] is not None and state["sent"] is None
    ]


def _rates_now(world, capacities):
    names = _running(world)
    return dict(zip(names, exact_rates([world[n] for n in names], capacities), strict=True))


def _next_time(world, rates, now):
    times = [now + world[name]["left"] / rate for name, rate in rates.items() if rate]
    for state in world.values():
        if state["sent"] is not None and state["finish"] is None:
            times.append(state["sent"] + state["latency"])
        if state["ready"] is None and state["release"] > now:
            times.append(state["release"])
    return min(times)
