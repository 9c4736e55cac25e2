"""Memory and step time of any rank of a large job, without the job: what the planner chooses from."""
