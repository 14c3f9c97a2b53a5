"""A job that can start, deep in the line, starts; and what is written for that does not grow with the backlog."""

from tests.support import manifests
from tests.support.proxy import Proxy
from tests.support.stage import GPU, Object, Stage


def job(stage: Stage, name: str, resource: str, **spec: object) -> Object:
    container = {"name": "main", "image": "train:1", "resources": {"limits": {resource: 1}}}
    role = manifests.role("worker", 1, container)
    return manifests.job(name, role, namespace=stage.namespace, queue=stage.name, **spec)


async def test_neither_a_start_nor_an_end_is_told_to_all_who_wait(stage: Stage, proxy: Proxy) -> None:
    """kubernetes-sigs/kueue#9715, #8095, #14477."""

    async def all_is_told() -> None:
        for _ in range(40):  # who is asked about and who waits take turns: more would be written if it had to be
            ttl = ((await stage.get_job("held")) or {})["spec"].get("ttlSecondsAfterFinished", 0) + 1
            changed = await stage.patch_job("held", {"spec": {"ttlSecondsAfterFinished": ttl}})
            generation = changed["metadata"]["generation"]
            await stage.until_job("held", lambda s, g=generation: s.get("observedGeneration") == g, "is answered")  # type: ignore[misc]

    def written() -> int:
        paths = [answer.path for answer in proxy.answers if answer.method == "PATCH"]
        return sum("/trainingjobs/gpu-" in path and "/status" in path for path in paths)

    await stage.nodes(1, gpus=1)
    quotas = [manifests.quota(1, flavor=stage.name), manifests.quota(8, flavor=stage.name, resource="cpu")]
    await stage.create(manifests.queue(stage.name, quotas=quotas))
    stage.controller(kubeconfig=proxy.kubeconfig).start()
    await stage.create(job(stage, "held", "cpu", hold=True))
    await stage.create(job(stage, "gpu-0", GPU))
    await stage.until_phase("gpu-0", "Running")

    submitted = 1
    for first, backlog in enumerate((30, 120)):
        while submitted <= first + backlog:
            await stage.create(job(stage, f"gpu-{submitted}", GPU))
            submitted += 1
        await stage.until_reason(f"gpu-{submitted - 1}", "WaitingForQuota")
        await all_is_told()
        before = written()

        await stage.create(job(stage, f"cpu-{backlog}", "cpu"))
        await stage.until_phase(f"cpu-{backlog}", "Running")
        await stage.end_pods(f"gpu-{first}")
        await stage.until_phase(f"gpu-{first + 1}", "Running")
        await all_is_told()
        assert written() - before < 30, f"with a backlog of {backlog}"
