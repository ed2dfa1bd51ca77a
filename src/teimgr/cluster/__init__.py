"""A fleet on several hosts: its certificate authority, how nodes join it, and workers on any host of a Ray cluster.

Ray places actors and watches hosts; the rest of teimgr handles vectors, health and lifecycle. Only modules of this
package that run in Ray's processes or in the bridge import ray.
"""
