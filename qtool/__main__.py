"""``python -m qtool``, and what the ``qtool`` script runs."""


def main() -> None:
    """Run the command line; end without a traceback when interrupted, even while it is imported."""
    try:
        from qtool.cli import main as run
        from qtool.cli.failures import catch_sigterm

        catch_sigterm()
        run()
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
