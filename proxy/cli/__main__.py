"""`python -m proxy.cli` is `kvpin`."""

from proxy.cli.main import main

main()
