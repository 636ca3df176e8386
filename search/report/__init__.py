"""What people see: tables, figures, exports, the report, the dashboard."""
