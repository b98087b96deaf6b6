"""A plugin that works everywhere; plugins of tests derive from it."""

from hwopt.plugin import Context, Decision, Plugin, Stage


class Applied(Plugin):
    stage = Stage.MODEL

    def probe(self, context: Context) -> Decision:
        return Decision.apply("always works")
