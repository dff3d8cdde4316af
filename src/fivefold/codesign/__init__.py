"""The coordinator over the five layers: plan down, cost up, until nothing is gained.

Every layer has a null form (today's practice), so the uncoordinated stack (B0) and every layer at
its best alone (B1) are special cases; the four co-designs are what information may cross which
boundary. Plans are judged by one simulation of all jobs on the cluster.
"""

from fivefold.codesign._ablation import AblationRow, ablate
from fivefold.codesign._arbiter import PlanningOptions
from fivefold.codesign._chakra import chakra_traces
from fivefold.codesign._codesigns import CoDesigns
from fivefold.codesign._compile import Outcome, run_plan
from fivefold.codesign._coordinator import CoDesignResult, plan_cluster
from fivefold.codesign._described import ModelJob, job_from_plan
from fivefold.codesign._execute import (
    Order,
    check_executable,
    execution_command,
    lab_options,
    read_measurements,
    read_order,
    write_order,
)
from fivefold.codesign._jobs import JobSpec, Split, check_jobs
from fivefold.codesign._modules import best_alone_plan, null_plan
from fivefold.codesign._msccl import msccl_programs
from fivefold.codesign._page import plan_page
from fivefold.codesign._page_ablation import ablation_page
from fivefold.codesign._pictures import draw_ablation, timeline_of
from fivefold.codesign._plans import ClusterPlan, JobPlan
from fivefold.codesign._records import DecisionRecord, decisions_to_json
from fivefold.codesign._workloads import Placement, load_jobs, place_jobs, synthetic_jobs

__all__ = [
    "AblationRow",
    "ClusterPlan",
    "CoDesignResult",
    "CoDesigns",
    "DecisionRecord",
    "JobPlan",
    "JobSpec",
    "ModelJob",
    "Order",
    "Outcome",
    "Placement",
    "PlanningOptions",
    "Split",
    "ablate",
    "ablation_page",
    "best_alone_plan",
    "chakra_traces",
    "check_executable",
    "check_jobs",
    "decisions_to_json",
    "draw_ablation",
    "execution_command",
    "job_from_plan",
    "lab_options",
    "load_jobs",
    "msccl_programs",
    "null_plan",
    "place_jobs",
    "plan_cluster",
    "plan_page",
    "read_measurements",
    "read_order",
    "run_plan",
    "synthetic_jobs",
    "timeline_of",
    "write_order",
]
