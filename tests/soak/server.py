"""`lazyrag serve` with every invariant of the scheduler checked after every step."""

from lazyrag.backend import local

stock = local.plugin_arguments
local.plugin_arguments = lambda debug: stock(True)

if __name__ == "__main__":
    from lazyrag.cli import main

    main()
