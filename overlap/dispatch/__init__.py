"""Token transport: how rows sorted by expert reach the experts and come back."""

from overlap.dispatch.local import LocalTransport
from overlap.dispatch.routing import Routing, make_routing
from overlap.dispatch.transport import Transport

__all__ = ["LocalTransport", "Routing", "Transport", "make_routing"]
