"""What generates the tables of docs/, compares with other libraries, and calibrates a machine."""
