@echo off
rem Says what is wrong with this machine, and what cures it.   doctor.bat [options]
setlocal disabledelayedexpansion
set "LR_FILE=%~f0"
set "LR_DO=doctor"
set LR_ARGS=%*
"%~dp0_run.bat"
