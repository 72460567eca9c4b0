"""The catalog of machines by name: what datasheets promise, what of it is sustained, and from where.

A :class:`MachineProfile` is a :class:`~megacompile.hardware.machine.Machine` (the rates that the simulator
reads) with the sizes and peaks that a report needs. Built-in ones are datasheet peaks times the
efficiencies below; a machine.json that was measured replaces them. Host memory is not a property of a card:
its bandwidth is assumed for the usual host and shown as such, its size is left to the user.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Literal

from megacompile.errors import MegacompileError
from megacompile.hardware.machine import Machine, this_cpu
from megacompile.json_codec import from_plain, parse_json, sealed, to_plain, unsealed
from megacompile.printable import is_printable
from megacompile.text_files import path_of, read_text
from megacompile.units import host_available

PROFILE_VERSION = 2
Dtype = Literal["bf16", "fp32"]

# Efficiencies: sustained over peak.
GEMM = 0.80  # assumed where the card's own share was not measured; those measured span 0.776 to 0.859
GEMM_SOURCE = "best product measured, ml-engineering MAMF table"
DEVICE_MEMORY = 0.90  # assumed: what tuned elementwise kernels reach on an H100 (QuACK: 3 of 3.35 TB/s)
LINK = 0.80  # assumed: pinned copies over PCIe after packet headers
NVLINK = 0.75  # assumed: large collectives over an NVSwitch
HOST_MEMORY = 0.75  # assumed: mixed reads and writes over the channels' peak
LAUNCH_SECONDS = 8e-6  # assumed: a call of one operator from Python, its launch included
# FlashAttention 2, of the card's bf16 peak: its authors' figures for 8192 causal tokens, heads of 128 columns
# and the deterministic backward on an H100 (306 and 166 TFLOP/s; pull request 1893 of flash-attention);
# assumed of other cards.
ATTENTION, ATTENTION_BACKWARD = 0.31, 0.168
ATTENTION_SOURCE = "FlashAttention 2 on an H100"
COPY_SECONDS = 10e-6  # assumed: fixed cost of one transfer

_PCIE4, _PCIE5 = 31.5e9, 63.0e9  # 16 lanes · 16 or 32 GT/s · 128/130 ÷ 8, each direction
_LINKS = {"PCIe 4.0 x16": _PCIE4, "PCIe 5.0 x16": _PCIE5, "NVLink-C2C": 450e9}
_HOSTS = {  # transfers per second · 8 bytes · channels
    "8 channels DDR5-4800": 307.2e9, "8 channels DDR4-3200": 204.8e9, "2 channels DDR5-5600": 89.6e9,
    "2 channels DDR4-3200": 51.2e9, "8 channels DDR5-5600": 358.4e9, "Grace LPDDR5X": 512e9,
}  # fmt: skip


@dataclass(frozen=True)
class MachineProfile:
    """A machine with sizes, peaks and sources.

    ``machine.flops`` is the sustained bf16 rate; ``peak_flops`` that of the datasheet, dense, to which
    MFU refers. ``host_bytes`` is None where the user has to say it. ``sources`` tells of each figure
    where it is from.
    """

    machine: Machine
    title: str = ""
    device_bytes: int | None = None
    host_bytes: int | None = None
    peak_flops: float | None = None
    fp32_flops: float | None = None
    peak_fp32_flops: float | None = None
    price_per_hour: float | None = None
    sources: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.machine.name

    def rates(self, dtype: Dtype) -> Machine:
        """The machine as the simulator sees it when blocks compute in ``dtype``."""
        machine = self.machine
        if dtype == "bf16" or self.fp32_flops is None:
            return machine
        slower = self.fp32_flops / machine.flops
        forward, backward = (
            rate and rate * slower for rate in (machine.attention_forward, machine.attention_backward)
        )
        return replace(machine, flops=self.fp32_flops, attention_forward=forward, attention_backward=backward)

    def peak(self, dtype: Dtype) -> float:
        """Datasheet peak of ``dtype``, or the sustained rate where no peak is known."""
        known = self.peak_flops if dtype == "bf16" else self.peak_fp32_flops
        return known if known is not None else self.rates(dtype).flops


_H, _A, _ADA = "NVIDIA H100 datasheet", "NVIDIA A100 datasheet", "NVIDIA Ada architecture whitepaper"
_GB202, _HGX = "NVIDIA RTX Blackwell architecture whitepaper", "NVIDIA HGX B200 datasheet, per GPU"
_D5, _D4 = "8 channels DDR5-4800", "8 channels DDR4-3200"
_NVLINKS = {  # bytes per second each way of a card on an NVSwitch, by its datasheet
    "h100-sxm": 450e9, "h200": 450e9, "b200": 900e9, "a100-40gb": 300e9, "a100-80gb-sxm": 300e9,
}  # fmt: skip
# name, title, compute capability, GB, multiprocessors, bf16 and fp32 TFLOP/s (dense, fp32 accumulation),
# GB/s, link, usual host, GEMM, source
_ROWS = (
    ("h100-pcie", "H100 80 GB PCIe", 90, 80, 114, 756, 51, 2000, "PCIe 5.0 x16", _D5, None, _H),
    ("h100-sxm", "H100 80 GB SXM", 90, 80, 132, 989, 67, 3350, "PCIe 5.0 x16", _D5, 0.801, _H),
    ("h200", "H200 141 GB SXM", 90, 141, 132, 989, 67, 4800, "PCIe 5.0 x16", _D5, 0.803,
     "NVIDIA H200 datasheet"),
    ("gh200", "GH200 96 GB", 90, 96, 132, 989, 67, 4000, "NVLink-C2C", "Grace LPDDR5X", 0.830,
     "NVIDIA GH200 Grace Hopper datasheet"),
    ("b200", "B200 180 GB SXM", 100, 180, 148, 2250, 75, 7700, "PCIe 5.0 x16", "8 channels DDR5-5600", 0.776,
     _HGX),
    ("a100-40gb", "A100 40 GB", 80, 40, 108, 312, 19.5, 1555, "PCIe 4.0 x16", _D4, 0.822, _A),
    ("a100-80gb-pcie", "A100 80 GB PCIe", 80, 80, 108, 312, 19.5, 1935, "PCIe 4.0 x16", _D4, 0.822, _A),
    ("a100-80gb-sxm", "A100 80 GB SXM", 80, 80, 108, 312, 19.5, 2039, "PCIe 4.0 x16", _D4, 0.859, _A),
    ("rtx-3090", "GeForce RTX 3090", 86, 24, 82, 71, 35.6, 936, "PCIe 4.0 x16", "2 channels DDR4-3200", None,
     "NVIDIA GA102 architecture whitepaper"),
    ("rtx-4090", "GeForce RTX 4090", 89, 24, 128, 165.2, 82.6, 1008, "PCIe 4.0 x16", "2 channels DDR5-5600",
     None, _ADA),
    ("rtx-5090", "GeForce RTX 5090", 120, 32, 170, 209.5, 104.8, 1792, "PCIe 5.0 x16", "2 channels DDR5-5600",
     None, _GB202),
    ("rtx-pro-6000", "RTX PRO 6000 Blackwell 96 GB", 120, 96, 188, 503.8, 126, 1792, "PCIe 5.0 x16", _D5,
     None, "NVIDIA RTX PRO Blackwell architecture whitepaper"),
    ("a6000", "RTX A6000 48 GB", 86, 48, 84, 154.8, 38.7, 768, "PCIe 4.0 x16", _D4, None,
     "NVIDIA RTX A6000 datasheet"),
    ("l40s", "L40S 48 GB", 89, 48, 142, 362, 91.6, 864, "PCIe 4.0 x16", _D5, None, "NVIDIA L40S datasheet"),
)  # fmt: skip


def _built_in(
    name: str, title: str, chip: int, gigabytes: int, processors: int, bf16: float, fp32: float,
    memory: float, link: str, host: str, gemm: float | None, source: str,
) -> MachineProfile:  # fmt: skip
    share = gemm if gemm is not None else GEMM
    how = GEMM_SOURCE if gemm is not None else "assumed"
    on_chip = host == "Grace LPDDR5X"
    machine = Machine(
        name, flops=bf16 * 1e12 * share, memory_bandwidth=memory * 1e9 * DEVICE_MEMORY,
        h2d_bandwidth=_LINKS[link] * LINK, d2h_bandwidth=_LINKS[link] * LINK,
        host_bandwidth=_HOSTS[host] * HOST_MEMORY, launch_seconds=LAUNCH_SECONDS,
        copy_seconds=COPY_SECONDS, shared_memory=True, processors=processors, chip=chip,
        attention_forward=bf16 * 1e12 * ATTENTION, attention_backward=bf16 * 1e12 * ATTENTION_BACKWARD,
        fabric_bandwidth=_NVLINKS[name] * NVLINK if name in _NVLINKS else None,
    )  # fmt: skip
    return MachineProfile(
        machine, title, device_bytes=gigabytes * 10**9, host_bytes=480 * 10**9 if on_chip else None,
        peak_flops=bf16 * 1e12, fp32_flops=fp32 * 1e12 * GEMM, peak_fp32_flops=fp32 * 1e12,
        sources={
            "device memory": f"{gigabytes} GB; {source}",
            "multiprocessors": f"{processors}; {source}",
            "bf16 rate": f"{bf16:g} TFLOP/s dense ({source}) × {share:g} ({how})",
            "attention": f"forward {ATTENTION:g}, backward {ATTENTION_BACKWARD:g} of the bf16 peak "
            f"({ATTENTION_SOURCE})",
            "our kernels": "attention and recurrences at the share of products that they reached on an H100",
            "launch": f"{LAUNCH_SECONDS * 1e6:g} µs a kernel (assumed)",
            "fp32 rate": f"{fp32:g} TFLOP/s without tensor cores ({source}) × {GEMM:g} (assumed)",
            "device bandwidth": f"{memory:g} GB/s ({source}) × {DEVICE_MEMORY:g} (assumed)",
            "link": f"{link}, {_LINKS[link] / 1e9:g} GB/s each way × {LINK:g} (assumed)",
            "host bandwidth": f"{host}, {_HOSTS[host] / 1e9:g} GB/s × {HOST_MEMORY:g} (assumed)"
            + ("" if on_chip else ", the usual host: give yours"),
            **_link_sources(name),
        },
    )  # fmt: skip


def _link_sources(name: str) -> dict[str, str]:
    """The sources of the rates between cards and between machines, where cards have links to each other."""
    if name not in _NVLINKS:
        return {}
    return {
        "fabric": f"NVLink, {_NVLINKS[name] / 1e9:g} GB/s each way and card × {NVLINK:g} (assumed)",
        "network": "50 GB/s each way and machine, a port of 400 Gbit/s (assumed): give yours",
    }


PROFILES: dict[str, MachineProfile] = {str(row[0]): _built_in(*row) for row in _ROWS}
_ALIASES = {"a100-40": "a100-40gb", "a100-80": "a100-80gb-sxm", "a100-80gb": "a100-80gb-sxm",
            "a100-pcie": "a100-80gb-pcie", "a100-sxm": "a100-80gb-sxm", "3090": "rtx-3090",
            "4090": "rtx-4090", "5090": "rtx-5090", "rtx-a6000": "a6000", "h200-sxm": "h200"}  # fmt: skip
THIS_CPU = "this-cpu"


def machine_key(name: str) -> str:
    """The name of a built-in machine as :data:`PROFILES` has it, for ways in which people write it."""
    key = name.strip().lower().replace("_", "-").replace(" ", "-")
    return _ALIASES.get(key, key)


def load_machine(name: str, dtype: Dtype = "bf16") -> MachineProfile:
    """The profile of a built-in name, of "this-cpu" (measured now) or of a machine.json."""
    key = machine_key(name)
    if key in PROFILES:
        return PROFILES[key]
    if key == THIS_CPU:
        return _measured_cpu(dtype)
    path = path_of(name, "The machine")
    if path.suffix == ".json" or path.is_file():
        return read_profile(path)
    names = [*PROFILES, *_ALIASES, THIS_CPU]
    near = [_ALIASES.get(n, n) for n in difflib.get_close_matches(key, names, n=3, cutoff=0.4)]
    near += [n for n in PROFILES if len(key) > 2 and key.split("-")[0] in n]
    unique = list(dict.fromkeys(near))[:3]
    hint = f"did you mean {' or '.join(unique)}?" if unique else "`megacompile machines` lists them."
    raise MegacompileError(f"No machine is called {name!r}: {hint} A machine.json also works.")


def this_cpu_unmeasured() -> MachineProfile:
    """The sizes of this machine with rates that say nothing, without torch."""
    return MachineProfile(Machine(THIS_CPU, 1.0, 1.0, 1.0, 1.0, 1.0), host_bytes=host_available())


def _measured_cpu(dtype: Dtype) -> MachineProfile:
    import torch

    machine = this_cpu(torch.bfloat16 if dtype == "bf16" else torch.float32)
    return MachineProfile(
        machine, "this CPU", host_bytes=host_available(), sources={"all rates": "measured just now"}
    )


def override(
    profile: MachineProfile,
    *,
    host_bandwidth: float | None = None,
    link_bandwidth: float | None = None,
    fabric_bandwidth: float | None = None,
    network_bandwidth: float | None = None,
    nvme_rates: Sequence[float] | None = None,
    price: float | None = None,
) -> MachineProfile:
    """The profile with the user's own host bandwidth, links (bytes/s each way: of a card to its host and to
    the other cards, of a machine to the others), what its drive reads and writes, and price per hour."""
    machine, sources = profile.machine, dict(profile.sources)
    if host_bandwidth is not None:
        machine = replace(
            machine,
            host_bandwidth=host_bandwidth,
            adam_bandwidth=None,
            adam_beside_h2d=1.0,
            adam_beside_d2h=1.0,
        )
        sources["host bandwidth"] = f"{host_bandwidth / 1e9:g} GB/s sustained, as given"
    if link_bandwidth is not None:
        machine = replace(machine, h2d_bandwidth=link_bandwidth, d2h_bandwidth=link_bandwidth)
        sources["link"] = f"{link_bandwidth / 1e9:g} GB/s each way sustained, as given"
    if fabric_bandwidth is not None:
        machine = replace(machine, fabric_bandwidth=fabric_bandwidth)
        sources["fabric"] = f"{fabric_bandwidth / 1e9:g} GB/s each way and card sustained, as given"
    if network_bandwidth is not None:
        machine = replace(machine, network_bandwidth=network_bandwidth)
        sources["network"] = f"{network_bandwidth / 1e9:g} GB/s each way and machine sustained, as given"
    how = "a fast consumer drive (assumed): measure or give yours"
    if nvme_rates is not None:
        read, write = nvme_rates
        machine = replace(machine, nvme_read_bandwidth=read, nvme_write_bandwidth=write)
        how = "sustained, as given"
    if nvme_rates is not None or "drive" not in sources:
        read, write = machine.nvme_read_bandwidth / 1e9, machine.nvme_write_bandwidth / 1e9
        sources["drive"] = f"read at {read:g} GB/s, written at {write:g} GB/s, {how}"
    price = price if price is not None else profile.price_per_hour
    return replace(profile, machine=machine, sources=sources, price_per_hour=price)


def profile_json(profile: MachineProfile, seal: bool = False) -> str:
    """The text of a machine.json; :func:`parse_profile` is its exact inverse.

    It can be edited, unless a digest is to ``seal`` it.
    """
    content = {"version": PROFILE_VERSION, **to_plain(profile)}
    return json.dumps(sealed(content) if seal else content, indent=1, allow_nan=False)


def read_profile(path: Path) -> MachineProfile:
    """The profile in a machine.json."""
    return parse_profile(read_text(path), str(path))


def parse_profile(text: str, what: str = "The machine file") -> MachineProfile:
    """Check and read the text of a machine.json; every fault is named with its field."""
    given = parse_json(text, what)
    if not isinstance(given, dict) or not isinstance(given.get("machine"), dict):
        raise MegacompileError(f'{what} describes no machine: it has no object "machine".')
    if "digest" in given:
        given = unsealed(given, what)
    if given.pop("version", None) != PROFILE_VERSION:
        raise MegacompileError(f"{what} is not of version {PROFILE_VERSION}: measure the machine again.")
    profile: MachineProfile = from_plain(MachineProfile, given, what, partial=True)
    check_figures(profile, what)
    check_figures(profile.machine, what)
    return profile


def check_figures(part: MachineProfile | Machine, what: str) -> None:
    """Refuse sizes, rates and seconds that no machine has, and texts that cannot be printed."""
    for name, value in ((f.name, getattr(part, f.name)) for f in fields(part)):
        if isinstance(value, str) and not is_printable(value):
            raise MegacompileError(f"{what}: {name} is {value[:40]!r}, which cannot be printed: rename it.")
        possible = type(value) not in (int, float) or _LEAST <= value <= _MOST
        if not (possible or (value == 0 and name in _MAY_BE_ZERO)):
            raise MegacompileError(f"{what}: {name} is {value!r}, which is not possible for a machine.")


_MAY_BE_ZERO = {"launch_seconds", "copy_seconds"}
_LEAST, _MOST = 1e-9, 1e21  # of any figure: beyond, times and bytes are no numbers any more
