"""profile x hardware x job -> Plan: decisions, precedence, the automatic profile."""
