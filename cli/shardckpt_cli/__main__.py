"""`python -m shardckpt_cli`, for launchers such as torchrun."""

from shardckpt_cli.start import main

main()
