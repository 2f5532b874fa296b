@echo off
rem Reports faults of this machine and their fixes.   doctor.bat [options]
setlocal disabledelayedexpansion
set "LR_FILE=%~f0"
set "LR_DO=doctor"
set LR_ARGS=%*
"%~dp0_run.bat"
