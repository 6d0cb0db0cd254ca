"""`python -m msds_serve` is the `msds` command."""

from msds_serve.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
