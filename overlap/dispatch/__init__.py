"""Token transport: how rows sorted by expert reach the experts and come back."""

from overlap.dispatch.arrival import Arrival
from overlap.dispatch.local import LocalTransport
from overlap.dispatch.routing import Routing, make_routing
from overlap.dispatch.transport import Transport

__all__ = ["Arrival", "LocalTransport", "Routing", "Transport", "make_routing"]
