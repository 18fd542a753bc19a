"""What joins the GPUs of a cluster, and how fast: one table, plain data.

Read where bytes that travel become seconds (:mod:`f8fx.communication`); nothing is decided from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True)
class Interconnect:
    """What joins the GPUs of a cluster, at line rate: no protocol reaches it.

    Attributes:
        name: the table's key.
        link_bandwidth: of a GPU to the others of its node, bytes/s in one direction.
        network_bandwidth: of a GPU's share of its node's network, bytes/s in one direction.
        node: GPUs in a node.
        link_latency, network_latency: seconds that one hop of a ring takes.
        launch: seconds that a collective takes before the first hop.
        sources: figure -> where it comes from.
    """

    name: str
    link_bandwidth: float
    network_bandwidth: float
    node: int = 8
    link_latency: float = 3.4e-6
    network_latency: float = 14e-6
    launch: float = 8.4e-6
    sources: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)


def _links(link: str, network: str) -> Mapping[str, str]:
    latency = "NCCL 2.2x src/graph/tuning.cc: hwLat and baseLat, ring, protocol Simple"
    return MappingProxyType(
        {
            "link_bandwidth": f"{link}; datasheets add both directions, this is one",
            "network_bandwidth": network,
            "link_latency": latency,
            "network_latency": latency,
            "launch": latency,
        }
    )


_CX7 = "one 400 Gb/s port (NDR InfiniBand or Ethernet) a GPU"

#: Clusters by the name of their accelerator, and two Ethernet clouds by the name of their machines.
INTERCONNECTS: Mapping[str, Interconnect] = MappingProxyType(
    {
        cluster.name: cluster
        for cluster in (
            Interconnect(
                "a100", 300e9, 25e9, sources=_links("DGX A100 datasheet", "same: 8 x HDR 200 Gb/s InfiniBand")
            ),
            Interconnect("h100", 450e9, 50e9, sources=_links("DGX H100 datasheet", f"same: {_CX7}")),
            Interconnect("h200", 450e9, 50e9, sources=_links("DGX H200 datasheet", f"same: {_CX7}")),
            Interconnect("b200", 900e9, 50e9, sources=_links("DGX B200 datasheet", f"same: {_CX7}")),
            Interconnect(
                "mi300x",
                448e9,
                50e9,
                sources=_links(
                    "AMD Instinct MI300X platform datasheet: 7 Infinity Fabric links of 128 GB/s",
                    f"nominal: {_CX7}",
                ),
            ),
            Interconnect(
                "p4d",
                300e9,
                6.25e9,
                sources=_links(
                    "AWS EC2 P4 page, p4d.24xlarge: 8 A100, 600 GB/s NVSwitch",
                    "same: 400 Gb/s Ethernet a node",
                ),
            ),
            Interconnect(
                "p5",
                450e9,
                50e9,
                sources=_links(
                    "AWS EC2 P5 page, p5.48xlarge: 8 H100, 900 GB/s NVSwitch",
                    "same: 3200 Gb/s Ethernet a node",
                ),
            ),
        )
    }
)
