"""Actions that change tenants, users, API keys, limits and policies.

Every action is atomic and safe to run concurrently with itself. It writes an audit entry and rebuilds the affected key
snapshots in the same transaction. Gateways are notified after the commit.
"""

from tenants.actions.common import ActionRefused, Conflict, VersionConflict
from tenants.actions.experiments import (
    do_create_experiment,
    do_delete_experiment,
    do_start_experiment,
    do_stop_experiment,
)
from tenants.actions.keys import (
    CHANGEABLE,
    do_create_api_key,
    do_create_playground_token,
    do_rehash_api_key,
    do_rehash_unpeppered,
    do_revoke_api_key,
    do_rotate_api_key,
    do_update_api_key,
    record_key_usage,
)
from tenants.actions.members import (
    do_accept_invitation,
    do_add_member,
    do_change_role,
    do_invite,
    do_remove_member,
    do_revoke_invitation,
    do_set_alert_emails,
)
from tenants.actions.notifications import do_set_notification_channels
from tenants.actions.policy_drafts import do_discard_policy_draft, do_publish_policy_draft, do_save_policy_draft
from tenants.actions.rules import (
    do_publish_policy,
    do_remove_limits,
    do_revert_policy,
    do_set_limits,
    do_withdraw_policy,
)
from tenants.actions.saved_views import do_delete_view, do_save_view
from tenants.actions.tenancy import (
    do_create_project,
    do_create_tenant,
    do_delete_project,
    do_delete_tenant,
    do_end_viewing,
    do_note_api_access,
    do_purge_tenant,
    do_restore_tenant,
    do_resume_tenant,
    do_start_viewing,
    do_suspend_tenant,
    do_update_project,
    do_update_settings,
    do_update_tenant,
)
from tenants.actions.users import (
    do_deactivate_user,
    do_grant_operator,
    do_reactivate_user,
    do_remove_second_factor,
    do_rename_user,
    do_reset_password,
    do_revoke_operator,
)
