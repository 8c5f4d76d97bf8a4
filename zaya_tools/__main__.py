"""`python -m zaya_tools` and `torchrun -m zaya_tools`: the same as `zaya`."""

from zaya_tools.cli.app import main

main()
