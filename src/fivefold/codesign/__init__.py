"""The coordinator over the five layers: plan down, cost up, until nothing is gained.

Every layer has a null form (today's practice), so the uncoordinated stack (B0) and every layer at
its best alone (B1) are special cases; the four co-designs are what information may cross which
boundary. Plans are judged by one simulation of all jobs on the cluster.
"""

from fivefold.codesign._page import plan_page
from fivefold.codesign.ablation import ablate, ablation_page
from fivefold.codesign.arbiter import PlanningOptions
from fivefold.codesign.coordinator import CoDesignResult, plan_cluster
from fivefold.codesign.explain import explain_plan
from fivefold.codesign.explain_running import explain_jobs, explain_run
from fivefold.codesign.exports import chakra_traces, msccl_programs
from fivefold.codesign.jobs import JobSpec
from fivefold.codesign.plans import ClusterPlan, CoDesigns, JobPlan
from fivefold.codesign.simulate import run_plan
from fivefold.codesign.workloads import load_jobs, synthetic_jobs

__all__ = [
    "ClusterPlan",
    "CoDesignResult",
    "CoDesigns",
    "JobPlan",
    "JobSpec",
    "PlanningOptions",
    "ablate",
    "ablation_page",
    "chakra_traces",
    "explain_jobs",
    "explain_plan",
    "explain_run",
    "load_jobs",
    "msccl_programs",
    "plan_cluster",
    "plan_page",
    "run_plan",
    "synthetic_jobs",
]
