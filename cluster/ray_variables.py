"""Variables that Ray and Tune read once, as they are imported: whoever imports them imports this first."""

import os

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
os.environ.setdefault("TUNE_WARN_THRESHOLD_S", "60")
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
# A Ray that we start listens on the loopback interface only. `_node_ip_address="127.0.0.1"` is not enough, because Ray
# replaces it with the machine's own address; this variable, named after the systems where it is the default, is. A cluster
# that we join keeps its own setting.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
# Where Ray's head is gone, we start it again or wait for it (`connection`); Ray would end the whole process after a minute.
os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "1000000")
# Ray's shutdown waits up to five seconds to flush task events, which nobody reads, to a head that may be gone. A head that
# comes back meanwhile ends this process.
os.environ.setdefault("RAY_task_events_shutdown_flush_timeout_ms", "1000")
# We handle Ctrl-C (search.run.driver): Tune would stop without reporting anything.
os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"
# Tune counts the cluster's resources for its own display and for warnings that we give ourselves, and Ray ends the whole
# process where its head has been started anew meanwhile.
os.environ.setdefault("TUNE_STATE_REFRESH_PERIOD", "1000000")
os.environ.setdefault("TUNE_WARN_INSUFFICENT_RESOURCE_THRESHOLD_S", "1000000")
os.environ.setdefault("TUNE_WARN_INSUFFICENT_RESOURCE_THRESHOLD_S_AUTOSCALER", "1000000")
# Ray gives its head 30 s to begin, which a busy machine may need longer for.
os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "300")
