"""A fleet on several hosts: its certificate authority, how nodes join it, and workers on any host of a Ray cluster.

Ray places actors and watches hosts; vectors, health and lifecycle stay with the rest of teimgr. Nothing outside this
package imports ray, and in it only what runs in Ray's own processes and in the bridge.
"""
