"""The command `fairgate vllm-flags`: options of vLLM by which the gateway knows most of it."""

from __future__ import annotations

from typing import Final

import click

from gateway import __version__

_TEXT: Final = """\
# Beside vLLM, in its own environment. It needs nothing that vLLM does not have; --no-deps leaves vLLM's packages alone.
pip install --no-deps fairgate=={version}

# vLLM 0.26 and later. VLLM_PLUGINS names all plug-ins that are loaded: add others that you use, with commas.
VLLM_PLUGINS=fairgate vllm serve MODEL --enable-prompt-tokens-details --shutdown-timeout 60

# vLLM 0.14 to 0.25:
vllm serve MODEL --enable-prompt-tokens-details --middleware backends.vllm_plugin.endpoint.StepsMiddleware

# Older, or without the plug-in (the gateway reads its metrics then):
vllm serve MODEL --enable-prompt-tokens-details
"""


@click.command("vllm-flags")
def vllm_flags() -> None:
    """Print vLLM's options, and how to install fairgate's plug-in, which reports vLLM's load after each step.

    Without the plug-in the gateway reads vLLM's metrics.
    """
    click.echo(_TEXT.format(version=__version__), nl=False)
