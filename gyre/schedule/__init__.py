"""Who does what when: counters of executions, the waterlevel inequality, and policies as pure functions
`decide(state, config) -> orders`. The WaterlevelActor counts, asks the policy and carries its orders out."""

from gyre.schedule.actor import CoreLost, WaterlevelActor, WaterlevelActorConfig
from gyre.schedule.policy import PolicyConfig, decide

__all__ = ["CoreLost", "PolicyConfig", "WaterlevelActor", "WaterlevelActorConfig", "decide"]
