"""LazyRAG inside vLLM's processes: scheduler, worker and attention. See backend/README.md."""


def register() -> None:
    """The `vllm.general_plugins` entry point; vLLM calls it in each of its processes, whatever engine runs there.

    Nothing to do: an engine names LazyRAG's scheduler and worker classes, which bring the rest along when vLLM imports
    them. The entry point makes vLLM import this package where it loads plugins: a broken installation shows there.
    """
