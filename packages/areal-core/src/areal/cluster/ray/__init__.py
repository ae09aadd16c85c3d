"""Cluster ``ray``: every worker a Ray actor; the one folder of this package that imports Ray."""

from areal.cluster.ray.cluster import RayCluster, RayOptions
from areal.cluster.ray.handle import RayHandle

__all__ = ["RayCluster", "RayHandle", "RayOptions"]
