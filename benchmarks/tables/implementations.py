"""The README's tables that compare implementations: speed of decodes, errors of operations, decodes on both sides."""

from collections.abc import Callable
from typing import Any

from benchmarks.common.shapes import SHAPES
from benchmarks.speed.ratios import EMBEDDED, ON_DEVICE, ratios, spread_text
from benchmarks.tables.markdown import NOT_YET, Column, Result, Results, number, table, where
from kernels_pallas.tiles import ROWS
from specfold_jax.methods import METHODS

IMPLS, ORDER = ("pallas", "xla", "triton", "torch"), list(METHODS)


def _ordered(rows: Results) -> Results:
    """By setting, whatever the order in which commands side by side measured them."""

    def place(row: Result) -> tuple[Any, ...]:
        s, method = row["setting"], row["setting"].get("method")
        whose = (IMPLS.index(s["impl"]), ORDER.index(method)) if method else ()  # a line of checks is of all implementations
        return list(SHAPES).index(s["shape"]), s["batch"], *whose[:1], s["drafts"] or 0, *whose[1:], -1 if s["tau"] is None else s["tau"]

    return sorted(rows, key=place)


def _setting(name: str) -> Column:
    return {"drafts": "D"}.get(name, name), lambda row: "-" if (value := row["setting"][name]) is None else str(value)


def _part(name: str) -> Column:
    def text(row: Result) -> str:
        return f"{row['measured']['one'][name]['median_ms']:.2f}"

    return f"{name}, ms", text


def decode(rows: Results) -> str:
    """Whole decodes, and the parts of one iteration."""

    def kernels(row: Result) -> str:
        check = row["measured"]["one"]["check"]
        # In loops on the device a check is its kernels: where they are much less, the profiler lost some.
        whole = check["kernels"] and (row["setting"]["impl"] not in ON_DEVICE or check["kernels"]["all"] > 0.8 * check["median_ms"])
        return f"{check['kernels']['all']:.2f}" if whole else "-"

    def same(row: Result) -> str:
        return f"{row['measured']['identical']} of {row['setting']['samples']}"

    columns: list[Column] = [_setting("shape"), _setting("impl"), _setting("batch"), ("method", lambda row: row["measured"]["title"])]
    columns.append(_setting("drafts"))
    columns += [("vanilla's tokens", same), ("tokens/s", number("tokens_per_second", 0)), ("forwards", number("nfe", 0))]
    columns += [("accepted depth", number("accepted_depth")), ("recompute", number("recompute_ratio"))]
    columns += [("ms an iteration", lambda row: spread_text(row["measured"]["iteration"]))]
    columns += [("step, ms", lambda row: spread_text(row["measured"]["one"]["step"])), _part("check"), ("its kernels, ms", kernels)]
    columns.append(_part("head"))
    columns += [("rows", lambda row: str(row["measured"]["one"]["rows"]))]
    columns += [("bytes floor, ms", lambda row: f"{row['measured']['one']['floors']['bytes_floor_ms']:.2f}")]
    found = table(_ordered(rows), *columns, samples=False)
    note = f'{EMBEDDED} From "step" on: one iteration on the state before the largest check. Step, check and head are timed apart, '
    note += "in PyTorch each with its own wait for the host. The floor: reading the weights at 4.3e12 bytes/s."
    return found if found == NOT_YET else f"{found}\n{note}\n"


def profile(rows: Results) -> str:
    """What the kernels of one iteration do, in milliseconds, beside the weights' floors: Pallas, 1.5B shape, batch 1."""

    def part(name: str) -> Column:
        return name, lambda row: f"{row['measured']['one']['step']['kernels']['groups'][name]:.3f}"

    def floor(row: Result) -> str:
        m = row["measured"]
        head = m["iteration"]["bytes_floor_ms"] - m["one"]["floors"]["bytes_floor_ms"]
        return f"{m['one']['floors']['bytes_floor_ms']:.3f} and {head:.3f}"

    found = [row for row in where(rows, shape="1.5b", impl="pallas", batch=1) if row["measured"]["one"]["step"]["kernels"]]
    columns: list[Column] = [("method", lambda row: row["measured"]["title"]), ("rows", lambda row: str(row["measured"]["one"]["rows"]))]
    columns += map(part, ("products", "attention", "gate", "pack", "rows", "head", "rest"))
    columns += [("all kernels", lambda row: f"{row['measured']['one']['step']['kernels']['all']:.3f}")]
    columns += [("step", lambda row: f"{row['measured']['one']['step']['median_ms']:.3f}"), ("floor, layers and head", floor)]
    return table(_ordered(found), *columns, samples=False)


def tokens(rows: Results) -> str:
    """Tokens a second of whole decodes: a line a shape, implementation, batch, D and tau, and how the methods compare."""
    found: Results = [{"setting": each, "measured": each} for each in ratios(rows)]

    def rate(method: str) -> Callable[[Result], str]:
        return lambda row: f"{row['measured']['tokens_per_second'][method]:,.0f}"

    def over(method: str) -> Callable[[Result], str]:
        rates = "tokens_per_second"
        return lambda row: f"{row['measured'][rates]['specfold'] / row['measured'][rates][method]:.2f}"

    columns: list[Column] = [_setting("shape"), _setting("batch"), _setting("impl"), _setting("drafts"), _setting("tau")]
    columns += [("vanilla", rate("vanilla")), ("Spiffy", rate("spiffy")), ("SpecFold", rate("specfold"))]
    columns += [("SpecFold / vanilla", over("vanilla")), ("SpecFold / Spiffy", over("spiffy"))]
    columns += [("recompute", number("recompute_ratio"))]
    return table(_ordered(found), *columns, samples=False)


def checks(rows: Results) -> str:
    """One check by its rows: a line a case and tau, a column an implementation."""
    impls = list(dict.fromkeys(row["setting"]["impl"] for row in rows))
    groups: dict[str, dict[str, Result]] = {}
    for row in rows:
        groups.setdefault(str(row["setting"] | {"impl": None}), {})[row["setting"]["impl"]] = row
    times = {str(row["setting"]): row["measured"]["median_ms"] for row in rows}

    def over(group: Result, **base: Any) -> str:
        mine, other = (times.get(str(group["setting"] | {"impl": "pallas"} | changes)) for changes in ({}, base))
        return f"{mine / other:.2f}" if mine and other else "-"

    def time(impl: str) -> Column:
        return f"{impl}, ms", lambda group: spread_text(group[impl]["measured"]) if impl in group else "-"

    def rows_of(group: Result) -> str:
        ratio = group["measured"]["recompute"]
        return f"{group['measured']['rows']}" + (f", {sum(ratio) / 2:.2f} of the drafts' computed" if ratio else "")

    def floor(group: Result) -> str:
        return f"{max(group['measured'][name] for name in ('bytes_floor_ms', 'arithmetic_floor_ms')):.2f}"

    found = _ordered([group | next(iter(group.values())) for group in groups.values()])
    columns: list[Column] = [
        _setting("shape"),
        _setting("batch"),
        _setting("drafts"),
        _setting("tau"),
        ("rows", rows_of),
        ("floor, ms", floor),
    ]
    columns += [time(impl) for impl in impls]
    if "pallas" in impls:
        columns += [
            ("pallas / xla", lambda group: over(group, impl="xla")),
            ("pallas / its vanilla", lambda group: over(group, drafts=0, tau=None)),
            ("pallas / its Spiffy", lambda group: over(group, tau=None)),
        ]
    return table(found, *columns, samples=False)


def ratio(rows: Results) -> str:
    """Iterations over each other, in one run; not PyTorch's, whose parts wait for the host."""
    found: Results = [{"setting": each, "measured": each} for each in ratios(rows) if each["impl"] in ON_DEVICE]

    def percent(name: str) -> Callable[[Result], str]:
        return lambda row: "-" if row["measured"][name] is None else f"{row['measured'][name]:.0%}"

    columns: list[Column] = [
        _setting("shape"),
        _setting("impl"),
        _setting("batch"),
        _setting("drafts"),
        _setting("tau"),
        ("rows", number("spiffy_rows", 0)),
    ]
    columns += [
        ("recompute", number("recompute")),
        ("vanilla, ms", number("vanilla_ms")),
        ("Spiffy / vanilla", number("spiffy_over_vanilla")),
    ]
    columns += [("SpecFold / vanilla", number("specfold_over_vanilla")), ("SpecFold / Spiffy", number("specfold_over_spiffy"))]
    columns += [("overhead, vanilla", percent("vanilla_overhead")), ("overhead, SpecFold", percent("overhead"))]
    columns += [("folding, of a check", percent("folding"))]
    return table(_ordered(found), *columns, samples=False)


def ops(rows: Results) -> str:
    """One operation of a layer, or the head: a line an operation and number of rows, a column an implementation."""
    lines: dict[str, Result] = {}
    for row in rows:
        line = lines.setdefault(str(row["setting"] | {"impl": None}), {"setting": row["setting"], "measured": {}})
        line["measured"][row["setting"]["impl"]] = row["measured"]

    def time(impl: str) -> Column:
        def text(row: Result) -> str:
            m = row["measured"].get(impl, {})
            return f"{m['median_us']:.1f} ({m['low_us']:.1f} to {m['high_us']:.1f})" if "median_us" in m else "-"

        return f"{impl}, us", text

    def floor(row: Result) -> str:
        return next((f"{m['floor_us']:.1f}" for m in row["measured"].values() if "floor_us" in m), "-")

    def over(row: Result) -> str:
        ratio = row["measured"].get("pallas", {}).get("over_xla")
        return f"{ratio:.2f}" if ratio else "-"

    impls = [impl for impl in IMPLS if any(impl in line["measured"] for line in lines.values())]
    columns: list[Column] = [("shape", lambda row: row["setting"]["shape"]), ("operation", lambda row: row["setting"]["op"])]
    columns += [("rows", _rows), ("floor, us", floor), *map(time, impls), ("pallas / xla", over)]
    return table(list(lines.values()), *columns, samples=False)


def _rows(row: Result) -> str:
    """Of those a call has room for, the rows that are computed."""
    s = row["setting"]
    return str(s["rows"]) if s["count"] == s["rows"] else f"{s['count']} of {s['rows']}"


def tiles(rows: Results) -> str:
    """What the kernels choose beside the fastest of the other tiles that were measured: a line a product and number of rows."""
    groups: dict[str, Results] = {}
    for row in rows:
        if "median_us" in row["measured"]:
            groups.setdefault(str(row["case"]), []).append(row)

    def time(row: Result | None) -> str:
        if row is None:
            return "-"
        blocks, warpgroups, columns, stages, splits, cluster = row["tile"]
        m = row["measured"]
        tile = f"{blocks * ROWS} x {columns} / {warpgroups} / {stages} / {splits} / {cluster}"
        return f"{m['median_us']:.1f} ({m['low_us']:.1f} to {m['high_us']:.1f}): {tile}"

    def line(group: Results) -> Result:
        mine = next((row for row in group if row["default"]), None)
        others = sorted((row for row in group if not row["default"]), key=lambda row: (row["measured"]["median_us"], row["tile"]))
        return {"setting": group[0]["case"], "mine": mine, "other": others[0] if others else None}

    columns: list[Column] = [(name, lambda row, name=name: row["setting"][name]) for name in ("shape", "op")]
    columns += [("rows", _rows), ("chosen, us", lambda row: time(row["mine"])), ("fastest other, us", lambda row: time(row["other"]))]
    lines = sorted((line(group) for group in groups.values()), key=lambda row: [row["setting"][name] for name in ("rows", "count", "op")])
    return table(lines, *columns, samples=False)


def parity(rows: Results) -> str:
    """Of each operation and type: the largest error of a floating-point output by implementation; whole numbers must be equal."""
    implementations = list(dict.fromkeys(row["implementation"] for row in rows))
    groups: dict[tuple[str, str], Results] = {}
    for row in rows:
        groups.setdefault((row["op"], row["dtype"]), []).append(row)

    def worst(implementation: str) -> Column:
        def text(group: Result) -> str:
            mine = [row for row in group["rows"] if row["implementation"] == implementation]
            bad = sum(not row["passed"] for row in mine)
            most = max((row["error"] for row in mine if row["tolerance"]), default=0.0)
            return "-" if not mine else f"{most:.1e}" + (f", {bad} beyond tolerance" if bad else "")

        return implementation, text

    def tolerance(group: Result) -> str:
        most = max(row["tolerance"] for row in group["rows"])
        return f"{most:.1e}" if most else "equal"

    columns: list[Column] = [("operation", lambda group: group["op"]), ("type", lambda group: group["dtype"])]
    columns += [("comparisons", lambda group: f"{len(group['rows'])}"), ("tolerance", tolerance), *map(worst, implementations)]
    return table([{"op": op, "dtype": dtype, "rows": mine} for (op, dtype), mine in groups.items()], *columns, samples=False)


def both_sides(rows: Results) -> str:
    """Prompts of which JAX and PyTorch say the same, and what the others differ in."""
    names = {"tokens": "same tokens", "nfe": "same forwards", "accepted": "same accepted drafts", "computed_rows": "same computed rows"}
    columns: list[Column] = [(name, lambda row, name=name: str(row[name])) for name in ("method", "dtype", "prompts")]
    columns += [(text, lambda row, name=name: str(row[f"equal_{name}"])) for name, text in names.items()]

    def compared(what: str) -> Callable[[Result], str]:
        def text(row: Result) -> str:
            found = row[what]
            return f"{found['differ']} of {found['compared']:,}" if found["compared"] else "-"

        return text

    def furthest(row: Result) -> str:
        return f"{row['gates']['furthest']:.1%} of tau" if row["gates"]["differ"] else "-"

    columns += [("replayed", lambda row: str(row["replayed"])), ("gates that differ", compared("gates"))]
    columns += [("furthest from tau", furthest), ("drafts that differ", compared("drafts"))]
    columns += [("decisions that differ", compared("decisions")), ("not shown to be ties", lambda row: str(row["unexplained"]))]
    return table(sorted(rows, key=lambda row: (ORDER.index(row["method"]), row["dtype"])), *columns, samples=False)
