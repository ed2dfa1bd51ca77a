"""Kubernetes manifests: a workload with all that is read, and everything else by its name."""

from __future__ import annotations

from tests.cli.migration.conftest import Convert

from teimgr.cli.migration.draft import KeyOutcome

MANIFEST = """
    apiVersion: v1
    kind: Service
    metadata: {name: embedder}
    ---
    apiVersion: apps/v1
    kind: Deployment
    metadata: {name: embedder}
    spec:
      replicas: 2
      strategy: {type: Recreate}
      template:
        spec:
          serviceAccountName: x
          initContainers: [{name: download, image: curl}]
          volumes: [{name: models, hostPath: {path: /srv/models}}, {name: cache, emptyDir: {}}]
          containers:
            - name: tei
              image: ghcr.io/huggingface/text-embeddings-inference:89-1.9
              args: [--model-id, "$(MODEL)", --port, "8080", --unknown, x]
              envFrom: [{secretRef: {name: more}}]
              env:
                - {name: MODEL, value: /models/bge}
                - {name: POOLING, value: cls}
                - {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: hf, key: token}}}
                - {name: API_KEY, valueFrom: {secretKeyRef: {name: keys, key: tei}}}
              ports: [{containerPort: 8080, name: http}]
              resources: {requests: {cpu: 2500m, memory: 4Gi}, limits: {nvidia.com/gpu: 2}}
              volumeMounts: [{name: models, mountPath: /models}, {name: cache, mountPath: /data}]
              readinessProbe: {httpGet: {path: /health, port: http}}
            - {name: proxy, image: envoy}
"""


def test_a_deployment_and_what_is_beside_it(converted: Convert) -> None:
    done = converted(tei_yaml=MANIFEST)

    assert done.instances == [
        {
            **{"name": "embedder-tei", "model_id": "/srv/models/bge", "port": 8080, "pooling": "cls"},
            **{"replicas": 2, "threads": 2},
        }
    ]
    assert done.draft.environment == {"HF_TOKEN": ""}
    own = "Deployment.embedder-tei"
    assert done.decisions() == [
        *(f"{own}.env.API_KEY", f"{own}.envFrom", f"{own}.resources.nvidia.com/gpu"),
        *("Deployment.embedder.initContainers", f"{own}.args --unknown"),
    ]
    for key in ("Service.embedder.kind", "strategy", "serviceAccountName", "resources.memory", "readinessProbe"):
        assert done.found(key).outcome is KeyOutcome.NONE
    assert done.found("embedder-proxy.image").outcome is KeyOutcome.NONE
    assert done.found("volumeMounts /models").outcome is KeyOutcome.CARRIED


def test_a_list_of_pods(converted: Convert) -> None:
    container = "{name: c, image: text-embeddings-inference, args: [--model-id=a/b]}"
    pod = f"{{apiVersion: v1, kind: Pod, metadata: {{name: %s}}, spec: {{containers: [{container}]}}}}"
    done = converted(pods_yml=f"{{apiVersion: v1, kind: List, items: [{pod % 'one'}, {pod % 'two'}]}}")

    assert done.instances == [{"name": name, "model_id": "a/b"} for name in ("one", "two")]
    assert done.decisions() == ["Pod.one.ports", "Pod.two.ports"]
