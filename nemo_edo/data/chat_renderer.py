"""A process that renders a model's chat template, which is a program that came with the model: it may run for ever, or
take all memory. ``chat.py`` starts it. It imports Jinja alone, and differs from transformers in its clock, which stands
still.

It reads lines of JSON: the template with its variables, then conversations; and writes one for each.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from datetime import datetime
from typing import Any

from jinja2 import DictLoader, TemplateError, TemplateNotFound, TemplateSyntaxError, ext, meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY_MB = 1024


class _Generation(ext.Extension):
    """``{% generation %}`` marks the model's text for those who train on it, and changes nothing."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def environment(now: datetime) -> ImmutableSandboxedEnvironment:
    """A sandbox like the one of ``transformers.utils.chat_template_utils``."""

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols], loader=DictLoader({})
    )
    made.filters["tojson"] = tojson
    made.globals |= {"raise_exception": raise_exception, "strftime_now": now.strftime}
    return made


def _said(error: Exception) -> str:
    if isinstance(error, TemplateSyntaxError):
        return f"has a syntax error in line {error.lineno}: {error.message}"
    if isinstance(error, TemplateNotFound):
        return f"includes another file ({error.name}), which is not read: write it into the template"
    if isinstance(error, MemoryError):
        return f"takes more than {MEMORY_MB} MiB"
    return f"raised {type(error).__name__}: {error}" if str(error) else f"raised {type(error).__name__}"


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_MB * 2**20,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    given = json.loads(sys.stdin.readline())
    template, variables = None, given["variables"]
    for line in [given["template"], *sys.stdin]:
        # SIGPROF ends the process, whatever it computes; what it has written says how far it came.
        signal.setitimer(signal.ITIMER_PROF, given["seconds"])
        try:
            if template is None:
                jinja = environment(datetime.fromisoformat(given["now"]))
                template = jinja.from_string(line)
                answer = {"names": sorted(meta.find_undeclared_variables(jinja.parse(line)))}
            else:
                answer = {"text": template.render(**{**variables, **json.loads(line)})}
        except Exception as error:  # a template can raise anything
            answer = {"error": _said(error)}
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), flush=True)
        if template is None:
            return
